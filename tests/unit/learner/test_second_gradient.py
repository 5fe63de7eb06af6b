"""The gradient computed a second time: equal to the accumulated one, and nothing is left of it.

Two processes run this file itself, with faults that only their sums can have.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from covey.algorithm.losses import LossConfig, LossInputs, LossType, policy_loss
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.batching.shares import PackPlan
from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends import ddp
from covey.learner.backends.single import SingleBackend
from covey.learner.second_gradient import RandomStates, compare_gradients, loss_derivative
from covey.learner.update import accumulate, update
from covey.training.process import ranks
from covey.types import Denominators, MicroBatch
from mutants.harness import BASE
from support.options import algorithm, credit, learner
from support.processes import run_in_processes
from support.runs import train_and_watch

OPTIMIZER = learner()
LOSS = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)


def batch_of(groups, backend, *, beta=0.0, steps=1):
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=16,
        num_iterations=steps,
        max_tokens=60,
        max_completion_length=20,
        stream=backend.policy.stream,
        device=torch.device("cpu"),
    )
    rows = annotate_and_credit(
        groups,
        backend,
        credit=credit(mask_truncated_completions=True),
        needs=needs(algorithm(beta=beta), steps),
        plan=plan,
        comm=LocalComm(),
    )
    batch = pack(rows, plan, rollout=0)[0]
    assert len(batch.micro_batches) > 2
    return batch


def match_of(batch, backend, config, fault=lambda masters: None):
    """The match of a step whose gradient `fault` has changed."""
    random_states = RandomStates(backend.policy.device)
    accumulate(batch, backend, config, LocalComm())
    fault(backend.masters)
    return compare_gradients(batch, backend, config, random_states, LocalComm())


@pytest.mark.parametrize("use_bias_correction_kl", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", [t for t in get_args(LossType) if t != "real"])
def test_the_derivative_is_that_of_the_loss(loss_type, beta, use_bias_correction_kl, assert_close_guarded):
    config = replace(LOSS, loss_type=loss_type, beta=beta, use_bias_correction_kl=use_bias_correction_kl)
    if loss_type == "cispo":
        config = replace(config, epsilon_high=5.0)
    logprob_N = torch.tensor([-1.0, -0.2, -3.0, -0.7, -2.0], requires_grad=True)
    zeros = torch.zeros(5)
    micro = MicroBatch(
        tokens_T=zeros,
        positions_T=zeros,
        segments=(),
        num_rows=1,
        context_U=zeros,
        context_N=zeros,
        target_N=zeros,
        sequence_N=torch.tensor([0, 0, 0, 1, 1]),
        temperature_N=zeros,
        sampler_logprob_N=zeros,
        advantage_N=torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5]),
        old_logprob_N=None,
        ref_logprob_N=torch.tensor([-1.4, -0.1, -3.0, -1.0, -0.5]),
        trained_count_S=torch.tensor([3, 2]),
        # The second row's episode has three more tokens in another pass.
        episode_count_S=torch.tensor([3, 5]),
        group_S=torch.tensor([0, 0]),
    )
    total = Denominators(num_episodes=4, num_tokens=11, max_completion_length=9)
    inputs = LossInputs(
        logprob_N=logprob_N,
        old_logprob_N=None,
        ref_logprob_N=micro.ref_logprob_N,
        advantage_N=micro.advantage_N,
        sequence_N=micro.sequence_N,
        trained_count_S=micro.trained_count_S,
        episode_count_S=micro.episode_count_S,
        denominators=total,
    )
    policy_loss(inputs, config).loss.backward()
    assert_close_guarded(loss_derivative(logprob_N.detach(), micro, total, config), logprob_N.grad, 1e-5)


@pytest.mark.parametrize("stream", ["padded", "packed", "prefix"])
@pytest.mark.parametrize(("beta", "steps"), [(0.0, 1), (0.1, 1), (0.1, 2)])
def test_the_gradient_of_a_step_is_its_rows(stream, beta, steps, tiny_policy, random_rollout):
    reference = tiny_policy(stream) if beta else None
    if reference is not None:
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.05)
    backend = SingleBackend(tiny_policy(stream), OPTIMIZER, reference=reference)
    config = replace(LOSS, beta=beta)
    match = match_of(batch_of(random_rollout, backend, beta=beta, steps=steps), backend, config)
    assert match.scale == pytest.approx(1.0, abs=1e-5)
    assert match.gap < 1e-5


def test_in_bfloat16_rounding_is_all_that_differs(tiny_policy, random_rollout):
    backend = SingleBackend(tiny_policy(), OPTIMIZER, compute_dtype=torch.bfloat16)
    match = match_of(batch_of(random_rollout, backend), backend, LOSS)
    assert match.scale == pytest.approx(1.0, abs=1e-3)
    assert match.gap < 1e-2


@pytest.mark.parametrize("stream", ["padded", "prefix"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_is_drawn_as_before(recompute, stream, tiny_policy, random_rollout):
    policy = tiny_policy(stream)
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    policy.keep_activations(recompute)
    backend = SingleBackend(policy, OPTIMIZER)
    batch = batch_of(random_rollout, backend)
    assert any(m.shared is not None for m in batch.micro_batches) == (stream == "prefix")
    accumulate(batch, backend, LOSS, LocalComm())
    first = backend.masters.gradients()
    for master in backend.masters.masters:
        master.grad = None
    assert match_of(batch, backend, LOSS).gap < 1e-5
    # Without the same draws the two would be apart, as two steps are.
    again = backend.masters.gradients()
    assert any(not torch.allclose(again[n], g, rtol=1e-2) for n, g in first.items())


@pytest.mark.parametrize(
    ("fault", "scale", "worst"),
    [
        (lambda masters: [m.grad.mul_(2.0) for m in masters.masters], 2.0, ""),
        (lambda masters: [m.grad.mul_(0.25) for m in masters.masters], 0.25, ""),
        (lambda masters: [m.grad.neg_() for m in masters.masters], -1.0, ""),
        (lambda masters: masters.masters[-1].grad.mul_(1.01), None, "model.model.norm.weight"),
    ],
)
def test_another_gradient_is_named(fault, scale, worst, tiny_policy, random_rollout):
    backend = SingleBackend(tiny_policy(), OPTIMIZER)
    assert backend.masters.names[-1] == "model.model.norm.weight"
    match = match_of(batch_of(random_rollout, backend), backend, LOSS, fault)
    assert match.gap > 5e-3
    assert scale is None or match.scale == pytest.approx(scale, rel=1e-5)
    assert match.worst.startswith(worst)


@pytest.mark.parametrize("place", [-1, -2, -3])
def test_in_bfloat16_a_norm_that_counts_twice_is_named(place, tiny_policy, random_rollout):
    """Of a small tensor less is compared than of others, and this much."""
    backend = SingleBackend(tiny_policy(), OPTIMIZER, compute_dtype=torch.bfloat16)

    def twice(masters):
        masters.masters[place].grad.mul_(2.0)

    match = match_of(batch_of(random_rollout, backend), backend, LOSS, twice)
    assert match.gap > 0.05 and match.worst == backend.masters.names[place]
    assert match.worst.endswith("norm.weight")


def test_a_step_with_the_comparison_is_the_same_step(tiny_policy, random_rollout):
    weights = []
    for compare in (False, True):
        torch.manual_seed(5)
        backend = SingleBackend(tiny_policy("padded"), OPTIMIZER)
        for layer in backend.policy.model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        result = update(batch_of(random_rollout, backend), backend, LOSS, 1e-2, LocalComm(), compare=compare)
        assert (result.match is not None) == compare
        assert all(p.grad is None and not p._backward_hooks for p in backend.policy.parameters())
        weights.append([*backend.masters.masters, torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_rows_without_a_gradient_say_nothing(tiny_policy, random_rollout):
    backend = SingleBackend(tiny_policy(), OPTIMIZER)
    batch = batch_of(random_rollout, backend)
    still = [replace(m, advantage_N=torch.zeros_like(m.advantage_N)) for m in batch.micro_batches]
    assert match_of(replace(batch, micro_batches=tuple(still)), backend, LOSS) is None


@pytest.mark.multi
def test_two_processes_sum_their_gradients(tmp_path):
    run_in_processes(__file__, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["none"] is None
        for fault, seen, cause in (
            ("averaged", "is 0.5 times", "averaging over the 2 ranks"),
            ("twice", "rounding explains", "counted it twice"),
        ):
            assert found[fault][:2] == ["F127", 1]
            assert seen in found[fault][2]
            assert cause in found[fault][3]


def _averaged(patch):
    made = ddp.DDPBackend.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.grad_scale = 1.0

    patch.setattr(ddp.DDPBackend, "__init__", init)


def _twice(patch):
    """The second rank's passes but the last are counted twice."""
    real = ddp.DDPBackend.backward

    def backward(self, micro, loss, *, last):
        out = real(self, micro, loss, last=last)
        if not last and os.environ["RANK"] == "1":
            for master in self.masters.masters:
                master.grad.mul_(2.0)
        return out

    patch.setattr(ddp.DDPBackend, "backward", backward)


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with ranks(2, work) as comm:
        for name, plant in (("none", None), ("averaged", _averaged), ("twice", _twice)):
            # Few tokens a pass: a rank has several, whatever its completions have in common.
            opts = {**BASE, "max_steps": 1, "output_dir": str(work / name), "max_tokens_per_micro_batch": 24}
            with pytest.MonkeyPatch.context() as patch:
                if plant is not None:
                    plant(patch)
                try:
                    train_and_watch(opts, comm=comm)
                    found[name] = None
                except GuardStop as stop:
                    words = stop.finding
                    found[name] = [words.code, words.step, words.seen, words.cause]
    (work / f"{comm.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
