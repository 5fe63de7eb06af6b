"""Runs that end early, save, say how to go on, and then go on as if they had not ended."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from covey.checkpoint.read import verify
from journeys.helpers import (
    assert_same_run,
    flags,
    metrics,
    read_lines,
    rows,
    small,
    succeed,
    write_jsonl,
)

LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 8, "learning_rate": 1e-3}
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(40))


def advice(out: str) -> list[str]:
    """The words behind `covey` in what a stopped run says to type."""
    (line,) = re.findall(r"Continue with\n +covey (.+)", out)
    return shlex.split(line)


def test_minutes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = succeed("train", *flags(small("d.jsonl", "run", max_minutes=0.02, max_steps=5000)))
    last = metrics(run)[-1]["step"]
    assert 1 <= last < 5000
    assert f"stopped   at step {last} of 5000 (max_minutes 0.02); saved" in done.out
    assert verify(run / f"checkpoint-{last}").trainer
    more = str(last + 3)
    assert advice(done.out) == ["train", "run/config.yaml", *LATEST]
    succeed(*advice(done.out), "--max_minutes", "10", "--max_steps", more)
    succeed("train", *flags(small("d.jsonl", "whole", max_steps=more)))
    assert_same_run(run, tmp_path / "whole", last + 3)


@pytest.mark.parametrize(
    "changes",
    [{"use_dora": True}, {"num_iterations": 2, "beta": 0.04}],
    ids=["dora", "in the middle of a rollout"],
)
def test_lora_resumes_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    """Two steps, a save, two more: the four steps of one run. Under a decaying learning rate too."""
    plan = {**LORA, "lr_scheduler_type": "cosine", "max_steps": 4, "save_steps": 4, **changes}
    # An odd number of steps before the stop is the middle of a rollout of two passes.
    cut = 3 if "num_iterations" in changes else 2
    succeed("train", *flags(small("d.jsonl", "whole", **plan)))
    done = succeed("train", *flags(small("d.jsonl", "cut", **plan)), "--stop_after_steps", str(cut))
    assert f"stopped   at step {cut} of 4" in done.out
    done = succeed(*advice(done.out))
    assert f"resumed   at step {cut} of 4" in done.out
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 4)
    moved = [line["grad_norm"] for line in metrics(tmp_path / "cut")]
    assert all(m is not None for m in moved)


@pytest.mark.slow
def test_signals_during_lora(tmp_path: Path) -> None:
    """Ctrl-C, go on, SIGTERM, go on to the end: the steps are those of one run."""
    run = tmp_path / "run"
    words = ["train", *flags(small("d.jsonl", "run", **LORA, max_steps=5000))]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        taken = len(steps(run))
        child = start(words, tmp_path)
        until = time.monotonic() + 90
        while len(steps(run)) < taken + 3:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.02)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
        assert child.returncode == code, err
        assert "then saving" in err
        last = steps(run)[-1]
        assert f"stopped   at step {last} of 5000" in out
        assert verify(run / f"checkpoint-{last}").trainer
        words = advice(out)
    succeed(*words, "--max_steps", str(last + 2))
    assert steps(run) == list(range(1, last + 3))
    succeed("train", *flags(small("d.jsonl", "whole", **LORA, max_steps=last + 2)))
    assert_same_run(run, tmp_path / "whole", last + 2)


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [line["step"] for line in read_lines(path)] if path.is_file() else []


def start(words: list[str], place: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, on one thread as this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "covey", *words],
        cwd=place,
        # MKL has a number of its own, by which products round.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_finished_run_is_lengthened(tmp_path: Path) -> None:
    succeed("train", *flags(small("d.jsonl", "run", **LORA)))
    done = succeed("train", "run/config.yaml", *LATEST, "--max_steps", "4")
    assert "done      4 steps" in done.out
    succeed("train", *flags(small("d.jsonl", "whole", **LORA, max_steps=4)))
    assert_same_run(tmp_path / "run", tmp_path / "whole", 4)
