"""What `.ci/run` does after `make test`, with a `make` of the test in place of the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo "$@" >>"$MADE"
case $1 in
test) exit "${TEST:-0}" ;;
test-whole) exit "${WHOLE:-0}" ;;
vllm-env) sleep "${ENV_S:-0}"; exit "${ENV:-0}" ;;
test-vllm) sleep "${VLLM_S:-0}"; exit "${VLLM:-0}" ;;
esac
"""
EVERY = ["test", "test-whole", "vllm-env", "test-vllm ARGS=--exitfirst"]


@pytest.mark.parametrize(
    ("given", "code", "made", "said"),
    [
        ({}, 0, EVERY, ""),
        ({"TEST": "2"}, 2, EVERY[:1], ""),
        ({"WHOLE": "2"}, 2, EVERY[:2], ""),
        ({"VLLM": "2"}, 2, EVERY, ""),
        ({"ENV": "2"}, 0, EVERY[:3], "left out: the tests with vLLM: `make vllm-env` ended with 2"),
        ({"ENV_S": "9", "VLLM_ENV_TAKES": "1"}, 0, EVERY[:3], "ended with 124 (124: not within 1 s)"),
        ({"VLLM_S": "9", "VLLM_TESTS_TAKE": "1"}, 0, EVERY, "had not reached in 1 s"),
        ({"VLLM_BEGINS_WITHIN": "0"}, 0, EVERY[:2], "left out: the tests with vLLM, since 0 s have passed"),
    ],
    ids=["all", "tests", "whole", "vllm", "no environment", "slow environment", "slow tests", "late"],
)
def test_ci(tmp_path: Path, given: dict[str, str], code: int, made: list[str], said: str) -> None:
    """A failure of tests fails; what cannot be installed, or takes too long, is left out and said."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI, tmp_path / ".ci" / "run")
    for name, text in (("make", MAKE), ("ip", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MADE": str(tmp_path / "made")}
    done = subprocess.run([tmp_path / ".ci" / "run"], env={**path, **given}, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "made").read_text().splitlines()) == (code, made)
    assert said in done.stderr and bool(said) == ("left out" in done.stderr)
