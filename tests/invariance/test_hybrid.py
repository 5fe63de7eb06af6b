"""`--fsdp hybrid_shard` is one more way to cut a step: four processes, of which each two on a machine hold
one model split in halves, against one process.

Launchers say which processes share a machine, and these say so of each two, though all of them are here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.telemetry.rollouts import read_rollouts
from invariance.test_sampled import sampled
from invariance.test_split import assert_same
from support.models import save_model
from support.runs import options, train_and_watch, train_in_processes, write_rollouts

pytestmark = pytest.mark.multi

RANKS, OF_A_MACHINE = 4, 2
# What a line of a rollout has of the process that made it, or of the clock.
APART = {"seconds", "sampler_logprobs"}


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of all rollouts in their order."""
    return [record for _, records in read_rollouts(run / "rollouts") for record in records]


def test_four_processes_are_as_one(tmp_path: Path) -> None:
    """The same gradients and updates of replayed rollouts; the same completions, noise keys, rewards and
    statistics of groups in a sampled run, record for record."""
    model, replay = save_model("qwen2", tmp_path / "model"), write_rollouts(tmp_path / "replay")
    hybrid = {"fsdp": "hybrid_shard"}
    names = ("dapo", "grpo")
    cut = [
        options(
            model,
            tmp_path / f"cut-{name}",
            replay,
            loss_type=name,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            **hybrid,
        )
        for name in names
    ]
    drawn = sampled(
        tmp_path / "drawn", per_device_train_batch_size=4, gradient_accumulation_steps=2, **hybrid
    )
    *found, sample = train_in_processes(
        [*cut, drawn], tmp_path / "work", processes=RANKS, machine=OF_A_MACHINE
    )
    for name, result in zip(names, found, strict=True):
        whole = train_and_watch(options(model, tmp_path / f"whole-{name}", replay, loss_type=name))
        assert_same(result, whole)
        # It is split over the two of a machine, not over all four.
        assert 0.45 < result.held / whole.held < 0.55
    alone = train_and_watch(sampled(tmp_path / "alone", per_device_train_batch_size=32))
    assert 0.45 < sample.held / alone.held < 0.55
    ours, theirs = records(tmp_path / "drawn"), records(tmp_path / "alone")
    assert len(ours) == len(theirs) == 3 * 32
    for one, other in zip(ours, theirs, strict=True):
        assert {k: v for k, v in one.items() if k not in APART} == {
            k: v for k, v in other.items() if k not in APART
        }
        assert one["sampler_logprobs"] == pytest.approx(other["sampler_logprobs"], abs=1e-4)
    statistics = [n for n in alone.metrics[0] if n.startswith(("reward", "group", "completion", "frac_"))]
    assert len(statistics) > 2
    for one, other in zip(sample.metrics, alone.metrics, strict=True):
        assert {n: one[n] for n in statistics} == pytest.approx({n: other[n] for n in statistics}, rel=1e-3)
