"""A rank that is killed where torchrun may start the ranks again: the run goes on by itself from its newest
checkpoint, and ends with the bits of one that nothing happened to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults.test_ranks import REWARD, WORDS, assert_same_tensors
from support.machines import plain_environment

pytestmark = pytest.mark.multi

# Rewards have a process of their own, whose parent is the rank. After the first checkpoint it ends, once.
KILLS = (
    REWARD
    + """
import os, signal
from pathlib import Path

_quiet = judge

def judge(completions, solution, trainer_state=None, **kwargs):
    mark = Path("killed")
    if os.environ["RANK"] == os.environ["COVEY_TEST_RANK"] and Path("run/checkpoint-2").is_dir():
        if not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
    return _quiet(completions, solution)
"""
)
NO_RESUME = [word for word in WORDS if word not in ("--resume_from_checkpoint", "auto")]


def started(
    folder: Path, *words: str, rank: str = "none", reward: str = KILLS
) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "mine.py").write_text(reward)
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**plain_environment(), **own, "COVEY_TEST_RANK": rank},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "it"
    done = started(folder, "covey", "train", *NO_RESUME, "--nproc_per_node", "2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


LAUNCHERS = {
    "covey": ("covey", "train", *NO_RESUME, "--nproc_per_node", "2", "--max_restarts", "2"),
    "torchrun": (
        *("torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"),
        *("-m", "covey", "train", *NO_RESUME),
    ),
}


@pytest.mark.parametrize(
    ("launcher", "rank"), [("covey", "1"), pytest.param("torchrun", "0", marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_started_again(launcher: str, rank: str, undisturbed: Path, tmp_path: Path) -> None:
    done = started(tmp_path / "it", *LAUNCHERS[launcher], rank=rank)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "it" / "killed").exists()
    out = tmp_path / "it" / "run"
    assert_same_tensors(out, undisturbed, 4)
    assert [path.name for path in out.parent.glob("run*")] == ["run"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    codes = [event["code"] for event in events if event["kind"] == "finding"]
    assert codes.count("F133") == 1 and codes.count("W162") == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert "restart 1 of" in said and "checkpoint-2" in said and "F133" in said
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_what_would_fail_again_is_not_started_again(tmp_path: Path) -> None:
    """A guard stops the run in the ranks; it ends with the guard's exit code."""
    nan = "def judge(completions, **kwargs):\n    return [float('nan')] * len(completions)\n"
    done = started(tmp_path / "it", *LAUNCHERS["covey"], reward=nan)
    assert done.returncode == 3, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "it/run/events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["kind"] == "finding"] == ["F107"]
    assert "W162" not in done.stdout + done.stderr
