"""The loss of a step, known from its rows before anything is forwarded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from covey.algorithm.losses import LossConfig, LossInputs, LossType, policy_loss
from covey.health.guards.batch import planned_loss
from covey.types import AnnotatedSample, Denominators, Outcome, Sample, TokenSequence, TrainSample

# Tokens, advantage, and whether the row is masked.
ROWS = ((4, 1.5, False), (1, -0.5, False), (3, -1.0, False), (2, 1.0, True))
LONGEST = 8
EPISODES = itertools.count()


def _row(tokens: int, advantage: float, masked: bool) -> TrainSample:
    sample = Sample(
        group=0,
        sibling=0,
        episode=next(EPISODES),
        tokens=TokenSequence.behind(
            1,
            token_ids=(7, *range(tokens)),
            is_trained=(False,) + (True,) * tokens,
            logprobs=(-0.5,) * tokens,
            versions=((0, tokens),),
        ),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )
    return TrainSample(
        annotated=AnnotatedSample(sample=sample, old_logprob_N=None, ref_logprob_N=None),
        advantage=advantage,
        loss_mask=(not masked,) * tokens,
        masked="truncated" if masked else None,
        needs_forward=not masked,
    )


# By hand: (6 - 0.5 - 3) / 8 tokens, (1.5 - 0.5 - 1) / 4 rows, (6 - 0.5 - 3) / (4 rows x 8).
@pytest.mark.parametrize(
    ("loss_type", "expected", "size"),
    [
        ("dapo", -2.5 / 8, 9.5 / 8),
        ("bnpo", -2.5 / 8, 9.5 / 8),
        ("grpo", 0.0, 3.0 / 4),
        ("dr_grpo", -2.5 / 32, 9.5 / 32),
    ],
)
def test_by_hand_and_by_the_loss_itself(loss_type: LossType, expected: float, size: float) -> None:
    rows = [_row(*row) for row in ROWS]
    assert planned_loss(rows, loss_type, LONGEST) == pytest.approx((expected, size))
    counts = torch.tensor([n for n, _, masked in ROWS if not masked])
    logprob_N = torch.linspace(-3.0, -0.1, int(counts.sum()))
    inputs = LossInputs(
        logprob_N=logprob_N,
        old_logprob_N=None,
        ref_logprob_N=None,
        advantage_N=torch.tensor([a for _, a, masked in ROWS if not masked]).repeat_interleave(counts),
        sequence_N=torch.arange(3).repeat_interleave(counts),
        trained_count_S=counts,
        episode_count_S=counts,
        denominators=Denominators(num_episodes=4, num_tokens=8, max_completion_length=LONGEST),
    )
    config = LossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.2)
    assert float(policy_loss(inputs, config).loss) == pytest.approx(expected, abs=1e-6)


# Rows of 4 tokens (advantage 1.5) and 1 are one episode, rows of 3 and 2 another, whose second is masked:
# (1.5 x 4 + 1.5 - 3) / 8 tokens, (1.5 x 5 / 5 - 3 / 3) / 2 episodes, (6 + 1.5 - 3) / (2 x 8), 4.5 / 2.
@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("dapo", -4.5 / 8), ("grpo", -0.5 / 2), ("dr_grpo", -4.5 / 16), ("luspo", -4.5 / 2)],
)
def test_rows_of_an_episode_by_hand(loss_type: LossType, expected: float) -> None:
    rows = []
    for episode, (tokens, advantage, masked) in zip(
        (0, 0, 1, 1), ((4, 1.5, False), (1, 1.5, False), (3, -1.0, False), (2, -1.0, True)), strict=True
    ):
        row = _row(tokens, advantage, masked)
        sample = replace(row.annotated.sample, episode=episode)
        rows.append(replace(row, annotated=replace(row.annotated, sample=sample)))
    assert planned_loss(rows, loss_type, LONGEST)[0] == pytest.approx(expected)


def test_a_step_without_tokens_has_no_loss() -> None:
    assert planned_loss([_row(2, 1.0, True)] * 2, "dapo", LONGEST) == (0.0, 0.0)
