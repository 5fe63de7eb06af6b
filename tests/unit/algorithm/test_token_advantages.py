"""Losses whose tokens have advantages of their own, against loops over single tokens in Python's floats.

Off-policy, with ratios on both sides of every bound, and advantages of both signs within one completion: each
token is clipped, gated or masked by its own sign.
"""

from __future__ import annotations

import pytest
import torch

from covey.algorithm.losses import LossConfig, LossInputs, policy_loss
from covey.types import Denominators
from support.losses import slow_value_and_slopes

COUNTS = (5, 3, 4)
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
LONGEST = 9


def inputs():
    generator = torch.Generator().manual_seed(2)
    num = sum(COUNTS)
    return LossInputs(
        logprob_N=(-1.0 + 0.3 * torch.randn(num, generator=generator)).requires_grad_(),
        old_logprob_N=-1.0 + 0.3 * torch.randn(num, generator=generator),
        ref_logprob_N=None,
        advantage_N=torch.randn(num, generator=generator),
        sequence_N=torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS)),
        trained_count_S=torch.tensor(COUNTS),
        episode_count_S=torch.tensor(COUNTS),
        denominators=Denominators(num_episodes=4, num_tokens=num, max_completion_length=LONGEST),
    )


@pytest.mark.parametrize("level", ["token", "sequence_token"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_takes_each_token_by_its_own_advantage(loss_type, level, assert_close_guarded):
    given = inputs()
    low, high = 0.1, 1.1 if loss_type == "cispo" else 0.15
    config = LossConfig(loss_type=loss_type, epsilon=low, epsilon_high=high, importance_sampling_level=level)
    output = policy_loss(given, config)
    value, slopes, _ = slow_value_and_slopes(given, config)
    assert_close_guarded(output.loss.detach(), value, 1e-5)
    (gradient_N,) = torch.autograd.grad(output.loss, given.logprob_N)
    assert_close_guarded(gradient_N, slopes, 1e-5)
    # Both signs within a completion, and tokens on both sides of a bound.
    signs = [set(part.sign().tolist()) for part in given.advantage_N.split(COUNTS)]
    assert {1.0, -1.0} in signs
    assert loss_type in ("sapo", "cispo") or 0.0 in slopes.tolist()


def test_at_the_level_of_the_sequence_tokens_would_share_their_gradient():
    """Why that level is refused: two tokens of one completion get the same slope whatever their steps say."""
    given = inputs()
    config = LossConfig(loss_type="grpo", epsilon=9.0, epsilon_high=9.0, importance_sampling_level="sequence")
    (gradient_N,) = torch.autograd.grad(policy_loss(given, config).loss, given.logprob_N)
    for part_N in gradient_N.split(COUNTS):
        assert torch.allclose(part_N, part_N[0].expand_as(part_N), rtol=1e-5)
    assert all(part_N.std() > 0.1 for part_N in given.advantage_N.split(COUNTS))


def test_the_off_policy_mask_takes_tokens_with_negative_advantage_alone():
    given = inputs()
    config = LossConfig(loss_type="dapo", epsilon=9.0, epsilon_high=9.0, off_policy_delta=0.001)
    sampled = LossInputs(
        **{n: getattr(given, n) for n in LossInputs.__dataclass_fields__ if n != "sampler_logprob_N"},
        sampler_logprob_N=given.logprob_N.detach() + 1.0,
    )
    (gradient_N,) = torch.autograd.grad(policy_loss(sampled, config).loss, given.logprob_N)
    assert torch.equal(gradient_N == 0.0, given.advantage_N < 0)
