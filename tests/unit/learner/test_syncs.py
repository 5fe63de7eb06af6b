"""Where an update waits for the device: on the meta device, which has no values to wait for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from covey.algorithm.losses import LossConfig
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.batching.shares import PackPlan
from covey.comm import LocalComm
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.learner.update import update
from covey.selftest.subject import LOSS_TYPES
from support.options import algorithm, credit, learner
from support.syncs import Syncs

OPTIMIZER = learner()
CREDIT = credit(mask_truncated_completions=True)
# What a step reads when it is over, whatever it was cut into.
STEP = {
    # the norm, how far the weights moved, and which tensors had no gradient (on the first steps)
    "learner/optimizer.py: step": 3,
    "learner/optimizer.py: _untouched": 1,
    # the sums for the metrics, those for engine against learner, and which passes changed the gradient
    "learner/update.py: totals": 1,
    "learner/update.py: _agreement": 1,
    "learner/update.py: silent": 1,
}


def plan_of(stream, max_tokens):
    return PackPlan(
        rank=0,
        world=1,
        completions_per_rank=16,
        num_iterations=1,
        max_tokens=max_tokens,
        max_completion_length=20,
        stream=stream,
        device=torch.device("meta"),
    )


@pytest.fixture
def backend_of(tiny_policy, monkeypatch):
    """A backend whose weights have no values. torch's fused AdamW does not know the meta device, and the
    plain one reads its step count for each tensor, so another optimizer takes its place."""

    def plain(groups, lr, **_):
        return torch.optim.SGD(groups, lr=lr)

    monkeypatch.setattr(torch.optim, "AdamW", plain)

    def make(stream, recompute, dtype):
        policy = tiny_policy(stream).to("meta")
        policy.keep_activations(recompute)
        return SingleBackend(policy, OPTIMIZER, compute_dtype=dtype)

    return make


def syncs_of(backend, rollout, loss, *, max_tokens, old=False):
    plan = plan_of(backend.policy.stream, max_tokens)
    with Syncs():
        # Annotations are read when they are made. Packing reads where siblings part that several passes hold.
        rows = annotate_and_credit(
            rollout,
            backend,
            credit=CREDIT,
            needs=needs(algorithm(), 2 if old else 1),
            plan=plan,
            comm=LocalComm(),
        )
        (batch,) = pack(rows, plan, rollout=0)
    with Syncs() as syncs:
        update(batch, backend, loss, 1e-6, LocalComm())
    return len(batch.micro_batches), syncs.found


_KEPT = ("none", "selective", "full")
_STEPS = [(stream, kept, torch.bfloat16) for stream in ("prefix", "packed", "padded") for kept in _KEPT]


@pytest.mark.parametrize(("stream", "recompute", "dtype"), [*_STEPS, ("prefix", "none", torch.float32)])
def test_a_step_waits_at_its_end(stream, recompute, dtype, backend_of, random_rollout):
    loss = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
    numbers = []
    for max_tokens in (10_000, 40):
        backend = backend_of(stream, recompute, dtype)
        passes, found = syncs_of(backend, random_rollout, loss, max_tokens=max_tokens)
        numbers.append(passes)
        if stream == "padded":
            # transformers looks for packed rows among the positions.
            assert found.pop("models/policy.py: _hidden") == passes
        assert found == Counter(STEP)
    assert numbers[0] == 1 and numbers[1] > 3


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "real"])
def test_no_loss_waits_but_one(loss_type, backend_of, random_rollout):
    """Off its policy, in several passes. FIPO reads how many rows a pass has; and `real`, which is not here,
    compares siblings by the host before the first pass."""
    backend = backend_of("prefix", "none", torch.bfloat16)
    loss = LossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28)
    passes, found = syncs_of(backend, random_rollout, loss, max_tokens=40, old=True)
    # The largest gap to the old logprobs is read, too.
    expected = Counter(STEP) + Counter({"learner/update.py: _with_evidence": 1})
    if loss_type == "fipo":
        expected["algorithm/loss_types/fipo.py: future_kl"] = passes
    assert found == expected
