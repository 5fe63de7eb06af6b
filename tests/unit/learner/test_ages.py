"""The loss of rows whose tokens several versions have sampled, against its formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from covey.algorithm.correction import Correction
from covey.algorithm.losses import LossConfig
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.batching.shares import PackPlan
from covey.comm import LocalComm
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.learner.update import update
from covey.models.policy import Policy
from covey.types import Score, ScoredGroup, Status
from support.groups import episode, scored
from support.options import algorithm, credit, learner

NOW = 3
LENGTHS = (6, 9, 4)
VERSIONS = (((3, 6),), ((1, 4), (2, 2), (3, 3)), ((2, 4),))
REWARDS = (1.0, 0.0, 0.5)
LOW, HIGH, BOUND = 0.2, 0.28, 1.5


def rollout(model: torch.nn.Module) -> tuple[list[ScoredGroup], list[list[float]], list[list[float]]]:
    """Return a group, the model's own logprobs of its tokens, and those of the samplers: equal where it is
    of the present version."""
    torch.manual_seed(5)
    prompt = (5, 6, 7)
    completions = [torch.randint(3, 96, (length,)).tolist() for length in LENGTHS]
    own, sampled, episodes = [], [], []
    for number, (tokens, versions) in enumerate(zip(completions, VERSIONS, strict=True)):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = model(ids).logits
        heat = episode(prompt, tokens).sampling.temperature
        logprob = (logits[0, len(prompt) - 1 : -1].double() / heat).log_softmax(-1)
        exact = [float(logprob[i, token]) for i, token in enumerate(tokens)]
        of_tokens = [v for v, count in versions for _ in range(count)]
        drift = torch.randn(len(tokens)).mul(0.4).tolist()
        theirs = [x if v == NOW else x + d for x, v, d in zip(exact, of_tokens, drift, strict=True)]
        own.append(exact)
        sampled.append(theirs)
        made = episode(prompt, tuple(tokens), sibling=number, logprobs=tuple(theirs))
        (row,) = made.sequences
        episodes.append(replace(made, sequences=(replace(row, versions=versions),)))
    scores = [Score(total=r, parts=(), status=Status.OK) for r in REWARDS]
    return [scored(episodes, scores)], own, sampled


def formula(own: list[list[float]], sampled: list[list[float]], *, decoupled: bool) -> float:
    """The mean over tokens of -w min(r A, clip(r) A), in double precision."""
    # 1, 0 and 0.5: their mean and their sample deviation are 0.5.
    total, count = 0.0, 0
    for reward, exact, theirs in zip(REWARDS, own, sampled, strict=True):
        advantage = (reward - 0.5) / (0.5 + 1e-4)
        for x, s in zip(exact, theirs, strict=True):
            # Before the first update the policy is the proximal one: its ratio is 1.
            ratio = 1.0 if decoupled else math.exp(x - s)
            weight = min(math.exp(x - s), BOUND) if decoupled else 1.0
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            total -= weight * min(ratio * advantage, clipped * advantage)
            count += 1
    return total / count


@pytest.mark.parametrize("max_tokens", [10_000, 20])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("stream", ["prefix", "packed", "padded"])
def test_the_loss_of_mixed_versions(
    tiny_policy: Callable[..., Policy], stream: str, decoupled: bool, max_tokens: int
) -> None:
    policy = tiny_policy(stream)
    # Without a layout, rows on their own: the same weights, computed by transformers alone.
    groups, own, sampled = rollout(tiny_policy("padded").model)
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=3,
        num_iterations=1,
        max_tokens=max_tokens,
        max_completion_length=20,
        stream=stream,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )
    mode = {"rollout_importance_sampling_mode": "token_truncate"} if decoupled else {}
    options = algorithm(use_decoupled_loss=decoupled, **mode)
    backend, comm = SingleBackend(policy, learner()), LocalComm()
    rows = annotate_and_credit(
        groups, backend, credit=credit(), needs=needs(options, 1), plan=plan, comm=comm, version=NOW
    )
    (batch,) = pack(rows, plan, 0, comm)
    correction = Correction(mode="token_truncate", threshold=BOUND) if decoupled else None
    config = LossConfig(loss_type="dapo", epsilon=LOW, epsilon_high=HIGH, correction=correction)
    result = update(batch, backend, config, 0.0, comm)
    assert result.metrics["loss"].value == pytest.approx(formula(own, sampled, decoupled=decoupled), abs=2e-5)
    # What the present version has sampled is compared with the learner, whatever row it stands in.
    gap = result.metrics["sampling/sampling_logp_difference/mean"]
    assert gap.count == 9 and gap.value == pytest.approx(0.0, abs=2e-6)
    # The third row has no advantage, so that it is left out of the forward pass.
    ratios = [math.exp(x - s) for x, s in zip(own[1][:6], sampled[1][:6], strict=True)]
    expected = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
    assert result.metrics["age/ess"].value == pytest.approx(expected, abs=1e-4)
    assert result.metrics["age/ess"].count == 6
