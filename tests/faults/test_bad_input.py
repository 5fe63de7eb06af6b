"""What a user can get wrong, through the real command: exit 2 in under 5 seconds, all problems together, four
parts, no traceback, and nothing written but the message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

BASE = (
    *("--model", "quickstart", "--dataset", "quickstart#512", "--reward_funcs", "accuracy"),
    *("--max_completion_length", "16"),
)
TIME_LIMIT_S = 5.0 * float(os.environ.get("COVEY_TEST_PATIENCE", "3"))


def covey(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command; the time limit is for a quiet machine, multiplied for one that runs other tests."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "covey", *words], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    if done.returncode == 2:
        assert time.perf_counter() - started < TIME_LIMIT_S
        assert "Traceback" not in done.stderr
    return done


def refused(*words: str, cwd: Path) -> str:
    """The message of a refusal, which wrote nothing."""
    before = sorted(p.name for p in cwd.rglob("*"))
    done = covey("train", *words, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert sorted(p.name for p in cwd.rglob("*")) == before
    return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    work = tmp_path_factory.mktemp("finished")
    done = covey("train", *BASE, "--max_steps", "2", "--output_dir", "run", cwd=work)
    assert done.returncode == 0, done.stderr
    return work / "run"


_MORE = ("1", "1", "8"), ("7", "1", "8"), ("3", "2", "4")
_SLOW = [pytest.param(batch, marks=pytest.mark.slow) for batch in _MORE]


@pytest.mark.parametrize("batch", [("5", "3", "2"), *_SLOW])
def test_impossible_batch_has_a_way_out_that_works(batch: tuple[str, str, str], tmp_path: Path) -> None:
    """The first fix of the message, typed, is accepted."""
    size, accumulation, group = batch
    words = [*BASE, "--per_device_train_batch_size", size, "--gradient_accumulation_steps", accumulation]
    words += ["--num_generations", group]
    done = covey("train", *words, "--max_steps", "1", "--output_dir", "run", cwd=tmp_path)
    assert done.returncode == 2
    typed = re.search(r"((?:--\w+ \d+ ?)+)", done.stderr)
    assert typed, done.stderr
    fixed = covey(
        "train", *words, *typed.group(1).split(), "--max_steps", "1", "--output_dir", "run", cwd=tmp_path
    )
    assert fixed.returncode == 0, fixed.stderr


def test_resume_from_a_damaged_checkpoint(finished: Path, tmp_path: Path) -> None:
    """One flipped bit of the weights is found before they are loaded."""
    subprocess.run(["cp", "-r", str(finished), str(tmp_path / "run")], check=True)
    weights = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    message = refused(
        *BASE, "--output_dir", "run", "--resume_from_checkpoint", "run/checkpoint-2", cwd=tmp_path
    )
    assert "model.safetensors" in message


def test_resume_with_another_learning_rate(finished: Path) -> None:
    message = refused(
        *(*BASE, "--output_dir", "run", "--resume_from_checkpoint", "latest"),
        *("--max_steps", "2", "--learning_rate", "0.1"),
        cwd=finished.parent,
    )
    assert "learning_rate" in message and "--allow_changes" in message


def test_several_processes_are_refused_once(tmp_path: Path) -> None:
    """The launching process checks before it starts any other."""
    message = refused(*BASE, "--nproc_per_node", "2", "--num_generations", "1", cwd=tmp_path)
    assert message.count("E201 num_generations") == 1


def test_overwriting_deletes_the_former_run_alone(finished: Path, tmp_path: Path) -> None:
    """Old records and checkpoints go, a file of the user stays, and the new config.yaml deletes nothing."""
    subprocess.run(["cp", "-r", str(finished), str(tmp_path / "run")], check=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    left = ("hang-0001/rank-0.txt", "status-rank-3.json", "nccl-rank-3", "live/ask")
    for name in ("runs/events.out.tfevents.1", "runs/another/config.yaml", "evaluations/a/eval.json", *left):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("old")
    words = (*BASE, "--output_dir", "run", "--max_steps", "1", "--overwrite_output_dir")
    done = covey("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "run" / "checkpoint-2").exists()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run" / "runs" / "another" / "config.yaml").read_text() == "old"
    assert not (tmp_path / "run" / "evaluations").exists()
    assert [name for name in left if (tmp_path / "run" / name).exists()] == []
    assert not list((tmp_path / "run" / "runs").glob("events.*"))
    assert "--overwrite_output_dir" in refused("run/config.yaml", cwd=tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0not json", b"\x02\0\0\0\0\0\0\0[]x"]
)
def test_damaged_weights_are_named(content: bytes, tmp_path: Path) -> None:
    from covey.quickstart.task import MODEL_DIR

    subprocess.run(["cp", "-r", str(MODEL_DIR), str(tmp_path / "model")], check=True)
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    words = ("--model", "model", "--dataset", "quickstart#512", "--reward_funcs", "accuracy")
    message = refused(*words, cwd=tmp_path)
    assert "safetensors" in message and "damaged" in message
