"""What `.ci/run` and the Makefile do to a machine: run here with a PATH that holds only stand-ins.

No test installs anything: what would is a stand-in, which writes down how it was called.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.needs import NEEDS

ROOT = Path(__file__).parents[2]
# What the scripts use of the machine as it is.
REAL = ("bash", "dirname", "env", "ln", "mkdir", "sh", "sleep", "timeout", "touch")
NOTES = 'echo "${0##*/} $*" >>"$MADE"\n'
MAKE = """
[ -n "$COVEY_NEEDS_ALL" ] || exit 9
case $1 in
test) exit "${TEST:-0}" ;;
test-whole) sleep "${WHOLE_S:-0}"; exit "${WHOLE:-0}" ;;
vllm-env) sleep "${ENV_S:-0}"; exit "${ENV:-0}" ;;
test-vllm) sleep "${VLLM_S:-0}"; exit "${VLLM:-0}" ;;
esac
"""
# As Python for the Makefile: it makes environments that hold the same stand-ins.
PYTHON = """
case "$*" in
"-m venv "*) mkdir -p "$3/bin"; for name in python ruff mypy; do ln -s "$0" "$3/bin/$name"; done ;;
esac
"""
EVERY = ["make test", "make test-whole ARGS=--exitfirst", "make vllm-env", "make test-vllm ARGS=--exitfirst"]
TOOLS = {name for one in NEEDS.values() for name in one.commands}
PACKAGES = sorted({one.packages for one in NEEDS.values() if one.packages})
INSTALL = "apt-get install -y -qq --no-install-recommends"
INSTALLERS = ("apt", "apt-get", "dnf", "yum", "apk", "pacman", "brew", "snap", "sudo")


def script(path: Path, text: str = "") -> None:
    path.write_text(f"#!/bin/sh\n{NOTES}{text}")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """The only folder of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in REAL:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    for name in (*INSTALLERS, "pip", "npm"):
        script(folder / name)
    return folder


def run(
    words: Sequence[str | Path], folder: Path, commands: Path, **given: str
) -> tuple[int, list[str], str]:
    """Exit code, how the stand-ins were called, and what was said."""
    made = folder.parent / "made"
    made.touch()
    own = {"PATH": str(commands), "MADE": str(made), **given}
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)
    return done.returncode, made.read_text().splitlines(), done.stderr


@pytest.fixture
def ci(tmp_path: Path, commands: Path) -> Path:
    """A copy of what `.ci/run` reads, on a machine that has all that tests need."""
    folder = tmp_path / "project"
    for name in (".ci/run", "tests/support/needs.py"):
        (folder / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, folder / name)
    for name in TOOLS:
        script(commands / name)
    script(commands / "make", MAKE)
    script(commands / "python3", f'exec "{sys.executable}" "$@"\n')
    return folder


@pytest.mark.parametrize(
    ("given", "code", "made", "said"),
    [
        ({}, 0, EVERY, ""),
        ({"TEST": "2"}, 2, EVERY[:1], ""),
        ({"WHOLE": "2"}, 2, EVERY[:2], ""),
        ({"WHOLE_S": "9", "WHOLE_ENDS_WITHIN": "1"}, 0, EVERY[:2], "left out: what the tests of whole runs"),
        ({"VLLM": "2"}, 2, EVERY, ""),
        ({"ENV": "2"}, 0, EVERY[:3], "left out: the tests with vLLM: `make vllm-env` ended with 2"),
        ({"ENV_S": "9", "VLLM_ENV_TAKES": "1"}, 0, EVERY[:3], "ended with 124 (124: not within 1 s)"),
        ({"VLLM_S": "9", "VLLM_TESTS_TAKE": "1"}, 0, EVERY, "had not reached in 1 s"),
        ({"VLLM_BEGINS_WITHIN": "0"}, 0, EVERY[:2], "left out: the tests with vLLM, since"),
    ],
    ids=[
        "all",
        "tests",
        "whole",
        "slow whole",
        "vllm",
        "no environment",
        "slow environment",
        "slow tests",
        "late",
    ],
)
def test_ci(ci: Path, commands: Path, given: dict[str, str], code: int, made: list[str], said: str) -> None:
    """A failure of tests fails; what cannot be installed, or takes too long, is left out and said."""
    ended, called, words = run([ci / ".ci" / "run"], ci, commands, **given)
    assert (ended, called[1:]) == (code, made), words
    assert said in words and bool(said) == ("left out" in words)


@pytest.mark.parametrize(
    ("absent", "packages"),
    [
        (["bwrap"], ["bubblewrap"]),
        (["ip", "nsenter"], [NEEDS["two machines"].packages]),
        (sorted(TOOLS - {"make"}), [one for one in PACKAGES if one != "make"]),
    ],
    ids=["bubblewrap", "ip", "all"],
)
def test_ci_installs_what_tests_need(
    ci: Path, commands: Path, absent: list[str], packages: list[str]
) -> None:
    for name in absent:
        (commands / name).unlink()
    code, called, _ = run([ci / ".ci" / "run"], ci, commands)
    assert code == 0
    assert called[1:] == ["apt-get update -qq", f"{INSTALL} {' '.join(packages)}", *EVERY]


def test_ci_ends_where_it_cannot_install(ci: Path, commands: Path) -> None:
    (commands / "bwrap").unlink()
    script(commands / "apt-get", "exit 100\n")
    code, called, _ = run([ci / ".ci" / "run"], ci, commands)
    assert (code, called[1:]) == (100, ["apt-get update -qq"])


@pytest.mark.needs("make")
@pytest.mark.parametrize("target", ["test", "test-whole", "test-slow"])
def test_make_installs_into_its_environment_alone(tmp_path: Path, commands: Path, target: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    before = {path.name for path in folder.iterdir()}
    script(commands / "python3", PYTHON)
    code, called, words = run([str(shutil.which("make")), target], folder, commands)
    assert code == 0, words
    assert {path.name for path in folder.iterdir()} - before == {".venv"}
    installs = [line for line in called if "install" in line]
    assert len(installs) == 2 and all(line.startswith("python -m pip ") for line in installs)
    assert {line.split()[0] for line in called} <= {"python3", "python", "ruff", "mypy"}
    assert any("-m pytest" in line for line in called)


def test_no_test_calls_what_installs() -> None:
    """But for pip in an environment that the test itself made."""
    system = rf"""["'`](?:{"|".join(INSTALLERS)})(?:["'`]| install| update)"""
    packages = r"""["'](?:pip3?|npm|conda|uv)["'], *["']install|-m pip[^"'`]* install"""
    calls = re.compile(f"{system}|{packages}")
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if calls.search(path.read_text(encoding="utf-8"))}
    speak_of_it = {"tests/support/needs.py", "tests/unit/test_ci.py", "tests/docs/test_inside_pages.py"}
    assert found == speak_of_it | {"tests/packaging/test_wheel.py"}
