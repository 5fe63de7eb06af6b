"""What a user can get wrong beside a run that is there: exit 2, four parts, no traceback, and nothing written
but the message; once through the command in a process of its own, which has a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.quickstart.task import MODEL_DIR
from journeys.helpers import covey, succeed

BASE = (
    *("--model", "quickstart", "--dataset", "quickstart#512", "--reward_funcs", "accuracy"),
    *("--max_completion_length", "16"),
)
TIME_LIMIT_S = 5.0 * float(os.environ.get("COVEY_TEST_PATIENCE", "3"))


def refused(*words: str) -> str:
    """The message of a refusal, which wrote nothing."""
    before = sorted(p.name for p in Path.cwd().rglob("*"))
    done = covey("train", *words)
    assert done.code == 2, done.err
    assert sorted(p.name for p in Path.cwd().rglob("*")) == before
    return " ".join(done.err.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    succeed("train", *BASE, "--max_steps", "2", "--output_dir", str(run))
    return run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_resume_with_another_learning_rate(finished: Path, here: Path) -> None:
    shutil.copytree(finished, here / "run")
    message = refused(
        *(*BASE, "--output_dir", "run", "--resume_from_checkpoint", "latest"),
        *("--max_steps", "2", "--learning_rate", "0.1"),
    )
    assert "learning_rate" in message and "--allow_changes" in message


def test_several_processes_are_refused_once(here: Path) -> None:
    """The launching process checks before it starts any other; the time limit is for a quiet machine,
    multiplied for one that runs other tests."""
    words = ("train", *BASE, "--nproc_per_node", "2", "--num_generations", "1")
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "covey", *words], cwd=here, capture_output=True, text=True, timeout=120
    )
    assert time.perf_counter() - started < TIME_LIMIT_S
    assert done.returncode == 2 and "Traceback" not in done.stderr and not [*here.iterdir()]
    assert done.stderr.count("E201 num_generations") == 1


def test_overwriting_deletes_the_former_run_alone(finished: Path, here: Path) -> None:
    """Old records and checkpoints go, a file of the user stays, and the new config.yaml deletes nothing."""
    shutil.copytree(finished, here / "run")
    (here / "run" / "notes.txt").write_text("mine")
    left = ("hang-0001/rank-0.txt", "status-rank-3.json", "nccl-rank-3", "live/ask")
    for name in ("runs/events.out.tfevents.1", "runs/another/config.yaml", "evaluations/a/eval.json", *left):
        (here / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "run" / name).write_text("old")
    succeed("train", *BASE, "--output_dir", "run", "--max_steps", "1", "--overwrite_output_dir")
    assert len((here / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (here / "run" / "checkpoint-2").exists()
    assert (here / "run" / "notes.txt").read_text() == "mine"
    assert (here / "run" / "runs" / "another" / "config.yaml").read_text() == "old"
    assert not (here / "run" / "evaluations").exists()
    assert [name for name in left if (here / "run" / name).exists()] == []
    assert not list((here / "run" / "runs").glob("events.*"))
    assert "--overwrite_output_dir" in refused("run/config.yaml")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0not json", b"\x02\0\0\0\0\0\0\0[]x"]
)
def test_damaged_weights_are_named(content: bytes, here: Path) -> None:
    shutil.copytree(MODEL_DIR, here / "model")
    (here / "model" / "model.safetensors").write_bytes(content)
    message = refused("--model", "model", "--dataset", "quickstart#512", "--reward_funcs", "accuracy")
    assert "safetensors" in message and "damaged" in message
