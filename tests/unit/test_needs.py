"""A test that lacks something here is skipped by name with the line that installs it, or fails in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.needs import NEEDS, lacks

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from support.needs import lacks, need

@pytest.mark.needs("openssl")
@pytest.mark.parametrize("number", [1, 2])
def test_marked(number): raise AssertionError("it ran")

@pytest.fixture
def two(): need("two machines")

def test_with_a_fixture(two): raise AssertionError("it ran")

def test_that_tried(): lacks("a registry", "npm: no answer")

def test_that_needs_nothing(): pass
"""
LINES = {
    "needs openssl: apt-get install openssl": "test_marked (2)",
    "needs two machines: apt-get install iproute2 util-linux hostname": "test_with_a_fixture",
    "needs a registry (npm: no answer): a network, or a mirror": "test_that_tried",
}


def test_what_is_lacking_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    """None of the machine's commands are in reach."""
    (tmp_path / "test_parts.py").write_text(TESTS)
    (tmp_path / "bin").mkdir()
    own = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    words = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, tmp_path / "test_parts.py"],
        env={**{n: v for n, v in os.environ.items() if n != "COVEY_NEEDS_ALL"}, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "1 passed, 4 skipped" in done.stdout
    blocks = done.stdout.split("skipped: ")[1:]
    assert len(blocks) == len(LINES)
    for line, name in LINES.items():
        (block,) = [b for b in blocks if b.startswith(line)]
        assert f"::{name}\n" in block


@pytest.mark.parametrize("name", NEEDS)
def test_in_ci_it_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_NEEDS_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"needs {name}: ."):
        lacks(name)
    monkeypatch.setenv("COVEY_NEEDS_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match=f"needs {name}: ."):
        lacks(name)
