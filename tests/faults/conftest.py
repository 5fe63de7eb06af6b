"""The run of a module that nothing happens to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Runs what the module's `run` does of a kind, once, with no fault in it; returns the run's directory."""

    @functools.cache
    def of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = request.module.run(folder, kind)
        assert ended.code == 0 and ended.left == [], ended.said
        return folder / "run"

    return of
