"""Episodes of several rows: each loss against a loop over episodes, rows and tokens in float64.

What is proved: the gradient by the logits is the loop's for ten losses, with KL terms, masks, corrections and
the entropy bonus, however the rows of a step are cut over micro-batches and ranks, whether rows of an episode
are together or not. Weights that count rows in place of episodes fail the same comparison. What is not: that
a model's whole step agrees, which tests/invariance/test_episodes.py says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast, contrast, contrast_sums
from covey.algorithm.correction import Correction
from covey.algorithm.losses import LossConfig, LossInputs, LossType, policy_loss
from covey.algorithm.ratios import sequence_means
from covey.batching.pack import micro_batches, pack
from covey.batching.shares import PackPlan, steps_of
from covey.learner.update import micro_inputs
from covey.types import Denominators, TokenStats
from support.episodes import LONGEST, Episode, Row, live, loop_loss, random_episodes, train_samples

LOSS_TYPES = get_args(LossType)
BASE = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
RTOL = 5e-5


# -- the same by covey, share by share ---------------------------------------------------------------------


def denominators(episodes: Sequence[Episode], *, has_keep: bool) -> Denominators:
    rows = [row for episode in episodes for row in live(episode)]
    return Denominators(
        num_episodes=len(episodes),
        num_tokens=sum(len(row.targets) for row in rows),
        max_completion_length=LONGEST,
        num_kept=int(sum(sum(row.keep) for row in rows)) if has_keep else None,
    )


def stats_of(rows: Sequence[Row]) -> TokenStats:
    """Logprobs and entropies of rows one behind the other, float32."""
    logits_NV = torch.cat([row.logits_nV for row in rows]).float()
    table_NV = logits_NV.log_softmax(-1)
    targets = [t for row in rows for t in row.targets]
    return TokenStats(
        logprob_N=table_NV[range(len(targets)), targets], entropy_N=-(table_NV.exp() * table_NV).sum(-1)
    )


def inputs_of(episodes: Sequence[Episode], share: Sequence[tuple[int, int]], *, has_keep: bool) -> LossInputs:
    """A micro-batch of these rows, each given by the numbers of its episode and of itself."""
    rows = [episodes[e].rows[r] for e, r in share]
    counts = torch.tensor([len(row.targets) for row in rows])
    stats = stats_of(rows)

    def flat(name: str) -> Tensor:
        return torch.tensor([x for row in rows for x in getattr(row, name)], dtype=torch.float32)

    return LossInputs(
        logprob_N=stats.logprob_N,
        old_logprob_N=flat("old"),
        ref_logprob_N=flat("reference"),
        advantage_N=torch.tensor([episodes[e].advantage for e, _ in share]).repeat_interleave(counts),
        sequence_N=torch.arange(len(rows)).repeat_interleave(counts),
        trained_count_S=counts,
        episode_count_S=torch.tensor([sum(len(r.targets) for r in live(episodes[e])) for e, _ in share]),
        denominators=denominators(episodes, has_keep=has_keep),
        sampler_logprob_N=flat("sampler"),
        entropy_N=stats.entropy_N,
        keep_N=flat("keep") if has_keep else None,
    )


def contrasts(
    episodes: Sequence[Episode],
    shares: Sequence[Sequence[tuple[int, int]]],
    parts: Sequence[LossInputs],
    tau: float,
) -> list[Contrast]:
    """Of each share, from the sums over all of them."""
    found = []
    for share, part in zip(shares, parts, strict=True):
        gap_N = part.logprob_N.detach() - part.old_logprob_N
        score_S = sequence_means(gap_N, part.sequence_N, part.trained_count_S) / tau
        advantage_S = torch.tensor([episodes[e].advantage for e, _ in share])
        found.append((score_S, advantage_S, torch.tensor([episodes[e].group for e, _ in share])))
    num_groups = len({episode.group for episode in episodes})
    sums_4P = sum(contrast_sums(*one, num_groups) for one in found)
    return [contrast(*one, sums_4P, tau) for one in found]


def live_rows(episodes: Sequence[Episode]) -> list[tuple[int, int]]:
    return [(e, r) for e, ep in enumerate(episodes) for r, row in enumerate(ep.rows) if not row.is_masked]


def random_shares(episodes: Sequence[Episode], rng: random.Random) -> list[list[tuple[int, int]]]:
    """All rows in the loss, in any order, in 1 to 4 shares."""
    rows = live_rows(episodes)
    rng.shuffle(rows)
    bounds = sorted(rng.sample(range(1, len(rows)), rng.randint(0, 3)))
    return [rows[a:b] for a, b in zip([0, *bounds], [*bounds, len(rows)], strict=True)]


Change = Callable[[LossInputs], LossInputs]


def covey_loss(
    episodes: Sequence[Episode],
    config: LossConfig,
    rng: random.Random,
    *,
    has_keep: bool,
    change: Change = lambda inputs: inputs,
) -> Tensor:
    """The sum over the shares of a random cut."""
    shares = random_shares(episodes, rng)
    parts = [change(inputs_of(episodes, share, has_keep=has_keep)) for share in shares]
    if config.loss_type == "real":
        of_shares = contrasts(episodes, shares, parts, config.real_tau)
        parts = [replace(part, contrast=own) for part, own in zip(parts, of_shares, strict=True)]
    return sum((policy_loss(part, config).loss for part in parts), start=torch.zeros(()))


def gradient(loss: Tensor, episodes: Sequence[Episode]) -> Tensor:
    """By all logits of the step, those of masked rows included, which are 0."""
    leaves = [row.logits_nV for episode in episodes for row in episode.rows]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


# -- the comparison ----------------------------------------------------------------------------------------

LEVELS = {level: {"importance_sampling_level": level} for level in ("sequence", "sequence_token")}
CORRECTIONS = {
    mode: {"correction": Correction(mode=mode, threshold=1.2)}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}
ADDED = {
    "plain": {},
    **LEVELS,
    **CORRECTIONS,
    "delta": {"delta": 1.1},
    "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k3": {"beta": 0.3, "kl_estimator": "k3"},
    "off-policy mask": {"off_policy_delta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "everything": {
        "beta": 0.2,
        "entropy_coef": 0.05,
        "off_policy_delta": 0.2,
        "correction": Correction(mode="token_truncate", threshold=1.3),
    },
}


def config_of(loss_type: str, **changes: object) -> LossConfig:
    if loss_type == "cispo":
        changes = {"epsilon_high": 1.1, **changes}
    return replace(BASE, loss_type=loss_type, **changes)


def most_rows(loss_type: str) -> int:
    """`real` takes one row an episode."""
    return 1 if loss_type == "real" else 3


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_any_cut_gives_the_gradient_of_the_loop(loss_type, added, assert_close_guarded):
    config, rng = config_of(loss_type, **ADDED[added]), random.Random(f"{loss_type}/{added}")
    for seed in range(3):
        episodes, has_keep = random_episodes(seed, most_rows=most_rows(loss_type)), seed == 2
        expected_loss = loop_loss(episodes, config, has_keep=has_keep)
        expected = gradient(expected_loss, episodes)
        for _ in range(3):
            found = covey_loss(episodes, config, rng, has_keep=has_keep)
            assert_close_guarded(gradient(found, episodes), expected, rtol=RTOL)
            # Terms cancel in the value: it is held to the size of what is added up.
            assert abs(float(found.detach()) - float(expected_loss.detach())) <= 1e-5 * float(
                expected.abs().sum()
            )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_loss_times_0_or_minus_1_or_2_fails(loss_type, assert_close_guarded):
    config, episodes = config_of(loss_type, beta=0.2), random_episodes(4, most_rows=most_rows(loss_type))
    expected = gradient(loop_loss(episodes, config, has_keep=False), episodes)
    for factor in (0.0, -1.0, 2.0):
        loss = factor * covey_loss(episodes, config, random.Random(1), has_keep=False)
        with pytest.raises(AssertionError, match="off by"):
            assert_close_guarded(gradient(loss, episodes), expected, rtol=RTOL)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "luspo", "dr_grpo"])
def test_weights_that_count_rows_fail(loss_type, assert_close_guarded):
    """Own tokens of the row in place of the episode's, and rows in place of episodes."""
    config, episodes = config_of(loss_type), random_episodes(5)
    expected = gradient(loop_loss(episodes, config, has_keep=False), episodes)
    num_rows = sum(len(episode.rows) for episode in episodes)

    def rows_as_episodes(inputs: LossInputs) -> LossInputs:
        return replace(inputs, denominators=replace(inputs.denominators, num_episodes=num_rows))

    def own_tokens_of_rows(inputs: LossInputs) -> LossInputs:
        return replace(inputs, episode_count_S=inputs.trained_count_S)

    changes = [rows_as_episodes, *([own_tokens_of_rows] if loss_type in ("grpo", "sapo") else [])]
    for change in changes:
        loss = covey_loss(episodes, config, random.Random(1), has_keep=False, change=change)
        with pytest.raises(AssertionError, match="off by"):
            assert_close_guarded(gradient(loss, episodes), expected, rtol=RTOL)


# A step of 2 episodes and 12 loss tokens; max_completion_length is 4. One episode has rows of 2 and 1 tokens
# and advantage 2: at a ratio of 1 each of its tokens adds -2.
#
#   grpo     -2 x 3 / (2 x 3) = -1      luspo  -2 x 3 / 2  = -3
#   dr_grpo  -2 x 3 / (2 x 4) = -3/4    dapo   -2 x 3 / 12 = -1/2
@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", -1.0), ("luspo", -3.0), ("dr_grpo", -0.75), ("dapo", -0.5)]
)
def test_an_episode_of_two_rows_by_hand(loss_type, expected, assert_close_guarded):
    logprob_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        logprob_N=logprob_N,
        old_logprob_N=None,
        ref_logprob_N=None,
        advantage_N=torch.full((3,), 2.0),
        sequence_N=torch.tensor([0, 0, 1]),
        trained_count_S=torch.tensor([2, 1]),
        episode_count_S=torch.tensor([3, 3]),
        denominators=Denominators(num_episodes=2, num_tokens=12, max_completion_length=4),
    )
    loss = policy_loss(inputs, config_of(loss_type)).loss
    loss.backward()
    assert_close_guarded(loss.detach(), expected, rtol=1e-6)
    assert_close_guarded(logprob_N.grad, [expected / 3] * 3, rtol=1e-6)


# -- through packing ---------------------------------------------------------------------------------------


def packed_loss(episodes: Sequence[Episode], config: LossConfig, plan: PackPlan) -> Tensor:
    """The sum over all ranks and their forward passes, as packing cuts the step."""
    rows, given = train_samples(episodes), [row for episode in episodes for row in episode.rows]
    samples, forward = [r.annotated.sample for r in rows], [r.needs_forward for r in rows]
    total, forwarded = torch.zeros(()), []
    for rank in range(plan.world):
        own = replace(plan, rank=rank)
        (batch,) = pack(rows, own, rollout=0)
        (step,) = steps_of(samples, forward, own)
        passes = micro_batches(samples, forward, step, own, rank)
        for numbers, micro in zip(passes, batch.micro_batches, strict=False):
            stats = stats_of([given[i] for i in numbers])
            total = total + policy_loss(micro_inputs(stats, micro, batch), config).loss
            forwarded += numbers
    assert sorted(forwarded) == [i for i, on in enumerate(forward) if on]
    return total


@pytest.mark.parametrize("stream", ["padded", "packed", "prefix"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "luspo", "dr_grpo", "dapo", "vespo"])
def test_packing_gives_the_gradient_of_the_loop(loss_type, world, stream, assert_close_guarded):
    config = config_of(loss_type, beta=0.2, correction=Correction(mode="token_mask", threshold=1.4))
    plan = PackPlan(
        rank=0,
        world=world,
        completions_per_rank=12 // world,
        num_iterations=1,
        max_tokens=11,
        max_completion_length=LONGEST,
        stream=stream,
        device=torch.device("cpu"),
    )
    for seed in range(2):
        episodes = random_episodes(seed)
        expected = gradient(loop_loss(episodes, config, has_keep=False), episodes)
        found = gradient(packed_loss(episodes, config, plan), episodes)
        assert_close_guarded(found, expected, rtol=RTOL)
