"""Computing in bfloat16 keeps float32 masters and float32 accumulation, in one process and over DDP's
buckets.

What is compared is the gradient against the float32 run's: rounding of single logprobs leaves about 1 %,
while a lost micro-batch, a rank that is not averaged or a doubled bucket would leave tens of percent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covey.selftest.compare import far
from support.models import save_model
from support.runs import (
    Result,
    options,
    train_and_watch,
    train_in_processes,
    write_rollouts,
)

LIMIT = 0.05


@pytest.mark.multi
def test_gradients_are_those_of_float32(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=2)
    split = {"per_device_train_batch_size": 2, "max_steps": 2}
    exact = train_and_watch(options(model, tmp_path / "float32", replay, max_steps=2))
    low = {**split, "torch_dtype": "bfloat16"}
    one = train_and_watch(options(model, tmp_path / "one", replay, gradient_accumulation_steps=4, **low))
    (two,) = train_in_processes(
        [options(model, tmp_path / "two", replay, gradient_accumulation_steps=2, **low)], tmp_path / "work"
    )
    for result in (one, two):
        overall = far(result.gradients[0], exact.gradients[0])
        assert 0.0 < overall < LIMIT
        assert all(g.dtype == torch.float32 for g in result.gradients[0].values())
        # Every element is stepped, which bfloat16 weights could not hold at a learning rate of 1e-6.
        moved = [float((result.after[k] != result.before[k]).float().mean()) for k in result.before]
        assert min(moved) > 0.2
    between = far(two.gradients[0], one.gradients[0])
    assert between < LIMIT
    for factor in (0.0, -1.0, 2.0):
        spoiled = {k: factor * v for k, v in two.gradients[0].items()}
        assert far(spoiled, exact.gradients[0]) > LIMIT


def test_small_updates_are_kept(tmp_path: Path) -> None:
    """At learning rate 1e-6 the masters move although most bfloat16 weights show nothing of it."""
    model = save_model("qwen2", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=2)
    result: Result = train_and_watch(
        options(model, tmp_path / "run", replay, torch_dtype="bfloat16", learning_rate=1e-6, max_steps=2)
    )
    masters = torch.cat([(result.after[k] != result.before[k]).flatten() for k in result.before])
    visible = torch.cat(
        [(result.after[k].bfloat16() != result.before[k].bfloat16()).flatten() for k in result.before]
    )
    assert float(masters.float().mean()) > 0.5
    assert float(visible.float().mean()) < 0.1
