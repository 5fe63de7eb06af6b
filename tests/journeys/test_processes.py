"""LoRA in two processes: the run of one process, cut in two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from faults import covey_run
from journeys.helpers import (
    assert_announced,
    completions,
    flags,
    metrics,
    plan_of,
    read_lines,
    rollouts,
    rows,
    small,
    succeed,
    tensors,
    write_jsonl,
)
from support.processes import run_in_processes

REWARD = """
def judge(completions, answer, log_metric, log_extra, **kwargs):
    log_metric("calls", float(len(completions)))
    log_extra("gold", list(answer))
    return [float(a in c) for c, a in zip(completions, answer)]
"""


@pytest.mark.multi
def test_two_processes_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(12))
    write_jsonl(tmp_path / "v.jsonl", rows(3, start=50))
    (tmp_path / "mine.py").write_text(REWARD)
    options = small(
        "d.jsonl",
        "one",
        tuner_type="lora",
        lora_rank=8,
        beta=0.04,
        max_steps=3,
        reward_funcs=["accuracy", "mine.py:judge"],
        # The second set has fewer completions than there are processes.
        val_dataset=["v.jsonl", "one=v.jsonl#1"],
        eval_steps=2,
        save_steps=1,
    )
    succeed("train", *flags(options))
    two = {**options, "output_dir": "two", "per_device_train_batch_size": 4, "nproc_per_node": 2}
    announced = plan_of(*flags(two))
    done = subprocess.run(
        [sys.executable, "-m", "covey", "train", *flags(two)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert completions(tmp_path / "two") == completions(tmp_path / "one")
    assert [m["step"] for m in second] == [1, 2, 3]
    for ours, theirs in zip(second, first, strict=True):
        assert ours.keys() == theirs.keys()
        assert {n for n in ours["n"] if not n.startswith(("time/", "throughput/"))} == {
            n for n in theirs["n"] if not n.startswith(("time/", "throughput/"))
        }
        for name, value in theirs.items():
            if isinstance(value, float) and name not in ("calls", "update_ratio"):
                # The largest gap between engine and learner is a few units of rounding.
                least = 1e-5 if name == "sampling/logprob_max_gap" else 1e-7
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=least), name
    assert_same_records(tmp_path / "two", tmp_path / "one")
    ours, theirs = (tensors(tmp_path / n / "checkpoint-3") for n in ("two", "one"))
    for name, tensor in theirs.items():
        if name.startswith("adapter_model"):
            assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
    # Each process has random generators of its own in the checkpoint.
    assert_announced(announced, tmp_path / "two" / "checkpoint-3", tmp_path / "two" / "checkpoint-2")


def assert_same_records(two: Path, one: Path) -> None:
    """Each of two processes wrote its half of every rollout; together they are what the one wrote, but for
    what depends on the clock and on how sums are rounded."""
    names = sorted(path.name for path in (two / "rollouts").iterdir())
    assert names == [f"rollout-{n:06d}.{rank}-of-2.jsonl" for n in range(3) for rank in range(2)]
    assert {len(read_lines(two / "rollouts" / name)) for name in names} == {4}
    ours, theirs = ([r for records in rollouts(run) for r in records] for run in (two, one))
    for our, their in zip(ours, theirs, strict=True):
        logprobs, advantage = their.pop("sampler_logprobs"), their.pop("advantage")
        assert our.pop("sampler_logprobs") == pytest.approx(logprobs, abs=1e-4)
        assert our.pop("advantage") == pytest.approx(advantage, abs=1e-4)
        assert our.pop("seconds") > 0 and their.pop("seconds") > 0
        assert our == their
        assert our["extras"]["gold"] == our["columns"]["answer"]


@pytest.mark.multi
@pytest.mark.parametrize("stage", ["zero2", "zero3_offload"])
def test_zero_on_one_process(stage: str, tmp_path: Path) -> None:
    """No launcher has told this process anything, as with one GPU."""
    write_jsonl(tmp_path / "d.jsonl", rows(12))
    changes = {"deepspeed": stage, "beta": 0.04, "per_device_train_batch_size": 32}
    words = ["train", *flags(small("d.jsonl", "run", **changes))]
    run_in_processes(covey_run.__file__, *words, processes=1, folder=tmp_path)
    first, second = metrics(tmp_path / "run")
    assert first["kl"] == 0 < second["kl"] and first["grad_norm"] > 0
