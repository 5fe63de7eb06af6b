"""From a rollout to gradients: the same whatever the cut, and a ratio of exactly 1 before the first update.

What is proved here is the arithmetic of all ranks, one after the other in this process; that processes
exchange their gradients rightly is for the tests that start several.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from covey.algorithm.losses import LossConfig, LossInputs, policy_loss
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.batching.shares import PackPlan
from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.learner.update import update
from covey.selftest.compare import far
from covey.types import Score
from support.groups import episode, scored
from support.options import algorithm, credit, learner

OPTIMIZER = learner()
CREDIT = credit(mask_truncated_completions=True)
LOSS = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)


def plan_of(**changes):
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=16,
        num_iterations=1,
        max_tokens=10_000,
        max_completion_length=20,
        stream="prefix",
        device=torch.device("cpu"),
    )
    return replace(plan, **changes)


def rows_of(groups, backend, plan, *, beta=0.0, steps=1, comm=None):
    return annotate_and_credit(
        groups,
        backend,
        credit=CREDIT,
        needs=needs(algorithm(beta=beta), steps),
        plan=plan,
        comm=comm or LocalComm(),
    )


def backend_of(tiny_policy, stream="prefix", *, reference=False):
    return SingleBackend(tiny_policy(stream), OPTIMIZER, reference=tiny_policy(stream) if reference else None)


def loss_function(batch, config):
    def loss(stats, micro):
        inputs = LossInputs(
            logprob_N=stats.logprob_N,
            old_logprob_N=micro.old_logprob_N,
            ref_logprob_N=micro.ref_logprob_N,
            advantage_N=micro.advantage_N,
            sequence_N=micro.sequence_N,
            trained_count_S=micro.trained_count_S,
            episode_count_S=micro.episode_count_S,
            denominators=batch.denominators,
        )
        return policy_loss(inputs, config)

    return loss


def test_rows_that_skip_the_forward_pass_would_not_have_changed_it(tiny_policy, random_rollout):
    backend = backend_of(tiny_policy)
    gradients = []
    for may_skip in (True, False):
        backend = backend_of(tiny_policy)
        plan = plan_of()
        found = annotate_and_credit(
            random_rollout,
            backend,
            credit=CREDIT,
            needs=replace(needs(algorithm(), 1), may_skip_rows=may_skip),
            plan=plan,
            comm=LocalComm(),
        )
        # 16 rows: one failed, one truncated, and the four of the flat group.
        assert sum(r.needs_forward for r in found) == (10 if may_skip else 14)
        (batch,) = pack(found, plan, rollout=0)
        for micro in batch.micro_batches:
            backend.backward(micro, loss_function(batch, LOSS), last=True)
        gradients.append(backend.masters.gradients())
    assert far(*gradients) <= 1e-6


@pytest.mark.parametrize("stream", ["padded", "packed", "prefix"])
def test_before_an_update_ratio_and_kl_are_exact(stream, tiny_policy, random_rollout):
    backend = backend_of(tiny_policy, stream, reference=True)
    plan = plan_of(stream=stream, completions_per_rank=8, num_iterations=2, max_tokens=80)
    rows = rows_of(random_rollout, backend, plan, beta=0.1, steps=4)
    batches = pack(rows, plan, rollout=0)
    assert len(batches) == 4
    for batch in batches:
        for micro in batch.micro_batches:
            with torch.no_grad():
                logprob = backend.policy(micro).logprob_N
            # To the last bit: the annotating pass is the training pass.
            assert torch.equal(micro.old_logprob_N, logprob)
            assert torch.equal(micro.ref_logprob_N, logprob)
    assert sum(m.old_logprob_N.count_nonzero() for b in batches for m in b.micro_batches) > 100


def test_annotations_of_several_ranks_are_those_of_one(tiny_policy, random_rollout):
    backend = backend_of(tiny_policy)
    plan = plan_of(completions_per_rank=8)
    alone = rows_of(random_rollout, backend, plan, steps=2)
    per_rank = [
        rows_of(random_rollout, backend, plan_of(world=2, rank=rank, completions_per_rank=4), steps=2)
        for rank in range(2)
    ]
    # Each row has them on the one rank that trains it.
    held = [[row.annotated.old_logprob_N for row in rows] for rows in zip(*per_rank, strict=True)]
    assert all(sum(values is not None for values in pair) == 1 for pair in held)
    shared = [next(values for values in pair if values is not None) for pair in held]
    for one, values in zip(alone, shared, strict=True):
        assert torch.allclose(one.annotated.old_logprob_N, values, rtol=0, atol=1e-6)
    # Rows that no rank forwards keep zeros.
    skipped = [v for r, v in zip(alone, shared, strict=True) if not r.needs_forward]
    assert len(skipped) == 6
    assert not any(x.count_nonzero() for x in skipped)


def test_without_need_nothing_is_annotated(tiny_policy, random_rollout):
    rows = rows_of(random_rollout, backend_of(tiny_policy), plan_of())
    assert all(r.annotated.old_logprob_N is None and r.annotated.ref_logprob_N is None for r in rows)


# -- update ------------------------------------------------------------------------------------------------


def batch_of(groups, backend, **changes):
    plan = plan_of(**changes)
    return pack(rows_of(groups, backend, plan), plan, rollout=0)[0]


def test_an_update_raises_what_has_an_advantage(tiny_policy, random_rollout):
    backend = backend_of(tiny_policy)
    batch = batch_of(random_rollout, backend)
    micro = batch.micro_batches[0]
    with torch.no_grad():
        before = backend.policy(micro).logprob_N
    result = update(batch, backend, LOSS, 1e-3, LocalComm())
    with torch.no_grad():
        change = backend.policy(micro).logprob_N - before
    assert float((change * micro.advantage_N).sum()) > 0
    assert result.skipped is None
    assert result.stats.grad_norm > 0
    tokens = sum(m.target_N.numel() for m in batch.micro_batches)
    assert {m.count for name, m in result.metrics.items() if name != "kl"} == {tokens}
    assert result.metrics["kl"].value is None
    # 96 tokens at random weights: entropy a little below ln 96; nothing is clipped at ratio 1.
    assert 0.9 * math.log(96) < result.metrics["entropy"].value <= math.log(96)
    assert result.metrics["clip_ratio/region_mean"].value == 0.0


def test_a_step_without_a_loss_token_is_skipped(tiny_policy, random_rollout):
    failed = [replace(g, scores=tuple(replace(s, total=None) for s in g.scores)) for g in random_rollout]
    backend = backend_of(tiny_policy)
    before = {n: p.detach().clone() for n, p in backend.policy.named_parameters()}
    result = update(batch_of(failed, backend), backend, LOSS, 1e-3, LocalComm())
    assert result.stats is None
    assert result.skipped
    assert all(torch.equal(p, before[n]) for n, p in backend.policy.named_parameters())


def test_a_step_without_signal_steps_with_a_zero_gradient(tiny_policy, random_rollout):
    flat = [replace(g, scores=tuple(replace(s, total=1.0) for s in g.scores)) for g in random_rollout]
    backend = backend_of(tiny_policy)
    result = update(batch_of(flat, backend), backend, LOSS, 1e-3, LocalComm())
    assert result.skipped is None
    assert (result.stats.grad_norm, result.stats.frac_params_changed) == (0.0, 0.0)
    # The optimizer was called: it has counted a step.
    steps = [v for k, v in backend.masters.state().items() if k.startswith("step/")]
    assert {float(s) for s in steps} == {1.0}


@pytest.mark.parametrize("stream", ["prefix", "packed"])
def test_no_pass_of_one_token_completions_is_taken_for_a_silent_one(stream, tiny_policy):
    """In passes that share a prompt the gradient of first tokens comes with the last of them."""
    totals, lengths = (1.0, 0.0, 0.3, 0.6), (1, 3, 1, 1)
    episodes = [
        episode((9, 8, 7), range(20, 20 + n), sibling=i, logprobs=(-4.0,) * n) for i, n in enumerate(lengths)
    ]
    group = scored(episodes, [Score(total=total, parts=()) for total in totals])
    backend = backend_of(tiny_policy, stream)
    plan = plan_of(completions_per_rank=4, max_tokens=4, stream=stream)
    (batch,) = pack(rows_of([group], backend, plan), plan, rollout=0)
    assert len(batch.micro_batches) == 4
    waits = stream == "prefix"
    assert batch.has_signal == (not waits, True, not waits, True)
    result = update(batch, backend, LOSS, 1e-3, LocalComm())
    assert result.silent == 0
    assert result.stats.grad_norm > 0.0


def test_a_gradient_that_is_not_finite_stops_before_anything_is_applied(tiny_policy, random_rollout):
    backend = backend_of(tiny_policy)
    batch = batch_of(random_rollout, backend)
    micro = batch.micro_batches[0]
    broken = micro.advantage_N.clone()
    broken[3] = float("nan")
    before = {n: p.detach().clone() for n, p in backend.policy.named_parameters()}
    with pytest.raises(GuardStop):
        update(
            replace(batch, micro_batches=(replace(micro, advantage_N=broken),)),
            backend,
            LOSS,
            1e-3,
            LocalComm(),
        )
    assert all(torch.equal(p, before[n]) for n, p in backend.policy.named_parameters())
