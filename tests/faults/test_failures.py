"""A process that cannot go on: every process of the run ends soon, and why is said once, in the terminal and
on record."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey import train
from covey.checkpoint import model_files, shards, write
from covey.checkpoint.read import verify
from covey.errors import RunFailed
from covey.learner import update
from covey.meeting import started
from covey.telemetry import jsonl
from covey.training.job import Job
from faults import failing_run

SMALL: dict[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#512"],
    "reward_funcs": ["accuracy", "format"],
    "per_device_train_batch_size": 8,
    "max_completion_length": 16,
    "learning_rate": 1e-4,
}
WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#512", "--reward_funcs", "accuracy", "format"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "16", "--save_steps", "1"),
    *("--nproc_per_node", "2", "--output_dir", "run"),
]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def statuses(run: Path) -> Iterator[int]:
    """The numbers of the processes that have trained in a run."""
    for path in run.glob("status-rank-*.json"):
        yield json.loads(path.read_text())["pid"]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("fault", "rank", "code", "finding"),
    [
        ("raise", 1, 1, "F131"),
        ("kill", 0, 1, "F133"),
        ("full", 0, 3, "F130"),
        pytest.param("raise", 0, 1, "F131", marks=pytest.mark.slow),
        pytest.param("exit", 1, 1, "F131", marks=pytest.mark.slow),
        pytest.param("kill", 1, 1, "F133", marks=pytest.mark.slow),
    ],
)
def test_what_ends_one_process_ends_all(
    fault: str, rank: int, code: int, finding: str, tmp_path: Path
) -> None:
    """Without the watchdog, whose time limit is half an hour."""
    run = tmp_path / "run"
    words = [sys.executable, failing_run.__file__, fault, str(rank), "train", *WORDS, "--max_steps", "20"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(finding) == 1, done.stderr
    assert "--resume_from_checkpoint auto" in done.stderr
    if fault != "kill":
        assert "Traceback" not in done.stderr
    if fault != "full":
        (event,) = [e for e in events(run) if e["kind"] == "finding" and e["code"][:3] == "F13"]
        assert event["code"] == finding and f"rank {rank}" in event["seen"]
    if fault == "raise":
        assert "ValueError: a fault of this rank alone" in done.stderr
        assert "in fail" in (run / f"failed-rank-{rank}.txt").read_text()
    assert all(started(pid) is None for pid in statuses(run))
    assert verify(run / "checkpoint-2").trainer


@pytest.mark.multi
def test_no_process_outlives_the_launching_one(tmp_path: Path) -> None:
    """kill -9 cannot be passed on."""
    run = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "covey",
        "train",
        *WORDS,
        "--max_steps",
        "100000",
        "--reward_trial",
        "false",
    ]
    with (tmp_path / "out").open("w") as out:
        child = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
        until = time.monotonic() + 120
        while len(pids := list(statuses(run))) < 2 or not (run / "metrics.jsonl").is_file():
            assert child.poll() is None and time.monotonic() < until, (tmp_path / "out").read_text()
            time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
    killed = time.monotonic()
    while any(started(pid) is not None for pid in pids):
        assert time.monotonic() - killed < 10
        time.sleep(0.05)


def planted(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, at: int) -> None:
    """Raise an error in the call of that number, the first being 1, and in every later one."""
    real, count = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= at:
            raise error
        return real(*args, **kwargs)

    patch.setattr(owner, name, failing)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stopped(run: Path, **changes: Any) -> RunFailed:
    """How a run of at most nine steps with a checkpoint after each second one fails."""
    with pytest.raises(RunFailed) as failed:
        train(**{**SMALL, "max_steps": 9, "save_steps": 2, "output_dir": str(run), **changes})
    assert failed.value.finding.fixes and not (run / "run.lock").exists()
    return failed.value


@pytest.mark.parametrize("where", ["metrics", "weights", "adapter", "optimizer", "state", "manifest"])
def test_a_full_disk_is_named_and_loses_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As safetensors says it too, which writes adapters; then the run goes on from what was saved before."""
    from safetensors import SafetensorError
    from safetensors import torch as tensors

    run = tmp_path / "run"
    lora = {"tuner_type": "lora", "lora_rank": 2} if where == "adapter" else {}
    words = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        if where == "metrics":
            real, count = jsonl.append_line, 0

            def cut(path: Path, record: Any) -> None:
                nonlocal count
                count += path.name == "metrics.jsonl"
                if count > 4:
                    raise full()
                real(path, record)

            patch.setattr("covey.telemetry.files.append_line", cut)
        elif where == "adapter":
            planted(patch, tensors, "save_file", words, 2)
        else:
            owner, name = {
                "weights": (model_files, "write_tensors"),
                "optimizer": (shards, "write_tensors"),
                "state": (write, "write_text"),
                "manifest": (write, "store_manifest"),
            }[where]
            planted(patch, owner, name, full(), 2)
        failed = stopped(run, **lora)
    assert (failed.finding.code, failed.exit_code) == ("F130", 3)
    assert "No space left on device" in failed.finding.seen and "are free" in failed.finding.seen
    newest = run / ("checkpoint-4" if where == "metrics" else "checkpoint-2")
    assert verify(newest).trainer and not list(run.glob(".tmp-checkpoint-*"))
    assert str(newest) in failed.finding.fixes[-1].text
    again = {**SMALL, **lora, "max_steps": 6, "save_steps": 2, "output_dir": str(run)}
    outcome = train(**again, resume_from_checkpoint="auto")
    assert outcome.step == 6
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file size is limited by the system, which writes as much as fits."""
    import resource

    path = tmp_path / "a.jsonl"
    jsonl.append_line(path, {"step": 1})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
        with pytest.raises(OSError) as failed:
            jsonl.append_line(path, {"step": 2, "words": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert failed.value.filename == str(path) and path.read_bytes() == before


def deleted(name: str) -> Any:
    return lambda run: shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def gone(run: Path) -> None:
    """In one move: the watchdog's thread may write its status there while rmtree empties it, which fails."""
    shutil.rmtree(run.rename(run.with_name("away")))


def replaced(run: Path) -> None:
    run.rename(run.with_name("away"))
    run.mkdir()


def taken(run: Path) -> None:
    (run / "checkpoint-4").write_text("mine")


CHANGED = {
    "the directory deleted": ("F132", gone),
    "the directory replaced": ("F132", replaced),
    "the rollouts deleted": ("F132", deleted("rollouts")),
    "the metrics deleted": ("F132", deleted("metrics.jsonl")),
    "the lock deleted": ("F132", deleted("run.lock")),
    "a file called checkpoint-4": ("F130", taken),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_directory_that_changes_under_a_run_stops_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, change = CHANGED[case]
    run, real = tmp_path / "run", Job.remaining_batches

    def changing(self: Job) -> Any:
        if self.progress.step == 3:
            change(run)
        return real(self)

    monkeypatch.setattr(Job, "remaining_batches", changing)
    failed = stopped(run)
    assert (failed.finding.code, failed.exit_code) == (code, 3)
    assert failed.finding.step is not None and failed.finding.step <= 6
    if case == "the directory deleted":
        assert not run.exists(), "nothing is written into a new one"
    elif case == "the directory replaced":
        assert list(run.iterdir()) == [] and verify(tmp_path / "away" / "checkpoint-2").trainer
    else:
        assert verify(run / "checkpoint-2").step == 2
    if code == "F130":
        assert (run / "checkpoint-4").read_text() == "mine"


@pytest.mark.parametrize("error", [ValueError("an unforeseen thing"), SystemExit(0), MemoryError()], ids=repr)
def test_what_nobody_foresaw_is_named_too(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, update, "accumulate", error, 3)
    run = tmp_path / "run"
    failed = stopped(run)
    is_memory = isinstance(error, MemoryError)
    code = "F135" if is_memory else "F131"
    assert (failed.finding.code, failed.exit_code, failed.finding.step) == (code, 1, 2)
    assert is_memory or type(error).__name__ in failed.finding.seen
    assert failed.__cause__ is error
    assert [e["code"] for e in events(run) if e["kind"] == "finding"] == [code]
    assert (
        "in accumulate" in (run / "failed-rank-0.txt").read_text()
        or "in failing" in (run / "failed-rank-0.txt").read_text()
    )


@pytest.mark.parametrize("damage", ["a changed byte", "no numbers"])
def test_a_run_that_has_ended_well_does_not_fail_for_its_picture(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of its records changes while it runs, or the reward never has a word."""
    run, real = tmp_path / "run", Job.finish_step

    def changing(self: Job, *args: Any) -> None:
        real(self, *args)
        with contextlib.suppress(FileNotFoundError):
            data = bytearray((run / "metrics.jsonl").read_bytes())
            data[0] = ord("(")
            (run / "metrics.jsonl").write_bytes(data)

    if damage == "a changed byte":
        monkeypatch.setattr(Job, "finish_step", changing)
    silent = {"reward_funcs": [lambda completions, **_: [None] * len(completions)]}
    outcome = train(
        **{**SMALL, "max_steps": 3, "output_dir": str(run), **(silent if damage == "no numbers" else {})}
    )
    assert (outcome.exit_code, outcome.step) == (0, 3)
    assert verify(run / "checkpoint-3").trainer and not (run / "reward.png").exists()
