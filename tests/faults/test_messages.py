"""Every refusal, word for word: the whole of standard error, read as a person reads it.

`messages/CASE.txt` holds the command and what it prints; COVEY_WRITE_MESSAGES=1 writes these files anew, and
what has changed in them is to be read like prose.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.cli.main import main
from faults import cases_inputs, cases_options, cases_run
from faults.case import Case

MESSAGES = Path(__file__).parent / "messages"
CASES = (*cases_options.CASES, *cases_inputs.CASES, *cases_run.CASES)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A case in a directory of its own, on a machine without a GPU or a launcher."""
    case: Case = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("NPROC_PER_NODE", "WORLD_SIZE", "RANK", "COVEY_OUTPUT_DIR", "COVEY_EXIT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for path, text in case.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    case.make(tmp_path)
    case.edge(monkeypatch, tmp_path)
    yield case


def everything_in(directory: Path) -> dict[str, bytes]:
    """Every file with its bytes; what Python compiles aside."""
    paths = sorted(p for p in directory.rglob("*") if "__pycache__" not in p.parts)
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else b"" for p in paths}


def test_message(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the whole text, no weights loaded and nothing written."""
    before, had_loader = everything_in(tmp_path), "covey.models.load" in sys.modules
    assert main(shlex.split(case.words)) == 2
    printed = capsys.readouterr()
    assert everything_in(tmp_path) == before
    assert had_loader or "covey.models.load" not in sys.modules
    assert printed.out == ""
    said = f"$ covey {case.words}\n\n{printed.err.replace(str(tmp_path), 'HERE')}"
    path = MESSAGES / f"{case.name}.txt"
    if os.environ.get("COVEY_WRITE_MESSAGES"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
