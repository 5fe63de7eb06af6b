"""The entropy bonus, the tokens of highest entropy, and the off-policy mask: by hand, with denominators that
no mask changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from covey.algorithm.losses import LossConfig, LossInputs, policy_loss
from covey.batching.pack import least_entropy, pack
from covey.comm import LocalComm
from covey.types import AnnotatedSample, Denominators, Outcome, Sample, TokenSequence, TrainSample
from support.steps import plan_of

CONFIG = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)


def inputs(**changes: object) -> LossInputs:
    """Two sequences, of 2 tokens and 1, of a step of 6 tokens; at ratio 1."""
    return replace(
        LossInputs(
            logprob_N=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
            old_logprob_N=None,
            ref_logprob_N=None,
            advantage_N=torch.tensor([1.0, 1.0, -2.0]),
            sequence_N=torch.tensor([0, 0, 1]),
            trained_count_S=torch.tensor([2, 1]),
            episode_count_S=torch.tensor([2, 1]),
            denominators=Denominators(num_episodes=3, num_tokens=6, max_completion_length=4),
            sampler_logprob_N=torch.tensor([-1.0, -2.0, -3.0]),
            entropy_N=torch.tensor([0.5, 1.0, 3.0], requires_grad=True),
        ),
        **changes,
    )


# -- entropy bonus -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo", "vespo"])
def test_the_bonus_is_a_mean_over_the_steps_tokens_whatever_the_loss(loss_type, assert_close_guarded):
    plain = policy_loss(inputs(), replace(CONFIG, loss_type=loss_type)).loss
    given = inputs()
    loss = policy_loss(given, replace(CONFIG, loss_type=loss_type, entropy_coef=0.1)).loss
    # 0.1 x (0.5 + 1 + 3) / 6, taken off the loss.
    assert_close_guarded((loss - plain).detach(), -0.075, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, given.entropy_N)
    assert_close_guarded(gradient, [-0.1 / 6] * 3, rtol=1e-6)


def test_the_bonus_reaches_the_kept_tokens_and_divides_by_their_number(assert_close_guarded):
    kept = {
        "keep_N": torch.tensor([0.0, 1.0, 1.0]),
        "denominators": Denominators(num_episodes=3, num_tokens=6, max_completion_length=4, num_kept=4),
    }
    given = inputs(**kept)
    plain = policy_loss(given, CONFIG).loss
    loss = policy_loss(given, replace(CONFIG, entropy_coef=0.1)).loss
    assert_close_guarded((loss - plain).detach(), -0.1 * 4.0 / 4, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, given.entropy_N)
    assert_close_guarded(gradient, [0.0, -0.025, -0.025], rtol=1e-6)


def test_without_a_weight_entropies_are_not_looked_at():
    assert torch.equal(policy_loss(inputs(), CONFIG).loss, policy_loss(inputs(entropy_N=None), CONFIG).loss)


# -- tokens of highest entropy -----------------------------------------------------------------------------


EPISODES = itertools.count()


def row(entropies: list[float], *, masked: str | None = None, group: int = 0) -> TrainSample:
    num = len(entropies)
    sample = Sample(
        group=group,
        sibling=0,
        episode=next(EPISODES),
        tokens=TokenSequence.behind(
            2,
            token_ids=(9, 8, *range(100, 100 + num)),
            is_trained=(False, False, *(True,) * num),
            logprobs=(-1.0,) * num,
            versions=((0, num),),
        ),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )
    return TrainSample(
        annotated=AnnotatedSample(sample=sample, entropy_N=torch.tensor(entropies)),
        advantage=1.0,
        loss_mask=(masked is None,) * num,
        masked=masked,
        needs_forward=masked is None,
    )


ROWS = [row([0.1, 0.9, 0.3]), row([0.8, 0.2]), row([5.0, 6.0], masked="truncated"), row([0.7, 0.4, 0.5])]


@pytest.mark.parametrize(
    ("share", "least"),
    [(0.125, 0.9), (0.2, 0.8), (0.25, 0.8), (0.5, 0.5), (0.75, 0.3), (0.999, 0.1), (1e-9, 0.9)],
)
def test_the_least_entropy_that_counts_by_hand(share, least):
    # Eight tokens, without those of the masked row: 0.9 0.8 0.7 0.5 0.4 0.3 0.2 0.1.
    assert least_entropy(ROWS, share, LocalComm())[0] == pytest.approx(least, rel=1e-6)


def test_all_count_where_all_are_asked_for_or_none_is_known():
    assert least_entropy(ROWS, 1.0, LocalComm()) == (None, None)
    assert least_entropy([row([1.0], masked="invalid")], 0.5, LocalComm()) == (None, None)


def test_equal_entropies_are_in_together():
    (batch,) = pack(
        [row([1.0, 1.0, 1.0]), row([0.5])], plan_of(completions_per_rank=2, top_entropy_quantile=0.25), 0
    )
    (micro,) = batch.micro_batches
    assert micro.keep_N.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch.denominators.num_kept == 3


def test_the_quantile_is_of_the_step_and_not_of_a_micro_batch():
    rows = [
        row([0.9, 0.8], group=0),
        row([0.7, 0.6], group=0),
        row([0.2, 0.1], group=1),
        row([0.3, 0.4], group=1),
    ]
    for max_tokens in (1000, 1):
        plan = plan_of(completions_per_rank=4, top_entropy_quantile=0.5, max_tokens=max_tokens)
        (batch,) = pack(rows, plan, 0)
        kept = torch.cat([m.keep_N for m in batch.micro_batches]).tolist()
        assert kept == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert batch.denominators == Denominators(
            num_episodes=4, num_tokens=8, max_completion_length=24, num_kept=4
        )


def test_tokens_that_do_not_count_keep_their_place_in_the_denominator(assert_close_guarded):
    given = inputs(keep_N=torch.tensor([0.0, 1.0, 1.0]))
    loss = policy_loss(given, CONFIG).loss
    (gradient,) = torch.autograd.grad(loss, given.logprob_N)
    assert_close_guarded(gradient, [0.0, -1 / 6, 2 / 6], rtol=1e-6)
    given = inputs(keep_N=torch.tensor([0.0, 1.0, 1.0]))
    loss = policy_loss(given, replace(CONFIG, loss_type="grpo")).loss
    (gradient,) = torch.autograd.grad(loss, given.logprob_N)
    assert_close_guarded(gradient, [0.0, -1 / 6, 2 / 3], rtol=1e-6)


def test_the_kl_term_reaches_tokens_that_do_not_count(assert_close_guarded):
    given = inputs(keep_N=torch.zeros(3), ref_logprob_N=torch.tensor([-1.0, -2.0, -3.0 - math.log(2.0)]))
    loss = policy_loss(given, replace(CONFIG, beta=0.5, use_bias_correction_kl=False)).loss
    (gradient,) = torch.autograd.grad(loss, given.logprob_N)
    assert_close_guarded(gradient, [0.0, 0.0, 0.5 * 0.5 / 6], rtol=1e-6)


# -- off-policy mask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "advantage", "is_kept"),
    [
        (0.3, -1.0, False),  # has lost more than 0.2 nats a token
        (0.1, -1.0, True),
        (0.3, 1.0, True),  # good completions stay
        (0.3, 0.0, True),
        (-5.0, -1.0, True),  # has become likelier
    ],
)
def test_off_policy_mask_by_hand(lost, advantage, is_kept, assert_close_guarded):
    # Both tokens of sequence 0 differ from its mean loss by 0.1; sequence 1 has lost nothing.
    sampler = torch.tensor([-1.0 + lost + 0.1, -2.0 + lost - 0.1, -3.0])
    given = inputs(sampler_logprob_N=sampler, advantage_N=torch.tensor([advantage, advantage, -2.0]))
    out = policy_loss(given, replace(CONFIG, off_policy_delta=0.2))
    (gradient,) = torch.autograd.grad(out.loss, given.logprob_N)
    own = -advantage / 6 if is_kept else 0.0
    assert_close_guarded(gradient, [own, own, 2 / 6], rtol=1e-6)
    assert float(out.sums["off_policy_mask/masked_frac"]) == (0.0 if is_kept else 2.0)
