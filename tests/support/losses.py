"""Policy losses once more: a loop over tokens in Python's floats, random steps to try it on, and cuts.

`slow_loss` takes the point at which weights are held still as an argument of its own, so that its slope by
finite differences is the gradient that the loss is to have, whatever a loss keeps out of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.algorithm.correction import Correction
from covey.algorithm.losses import LossConfig, LossInputs
from covey.types import Denominators


@dataclass(frozen=True)
class Case:
    """A micro-batch and the loss to take of it."""

    inputs: LossInputs
    config: LossConfig


def _members(inputs: LossInputs) -> list[list[int]]:
    num = inputs.trained_count_S.shape[0]
    return [[n for n, s in enumerate(inputs.sequence_N.tolist()) if s == number] for number in range(num)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(config: LossConfig, n: int, own: list[int], now: list[float], held: list[float], old: list[float]):
    """The ratio of token n, which moves with `now`."""
    if config.importance_sampling_level == "token":
        return math.exp(now[n] - old[n])
    if config.importance_sampling_level == "sequence":
        return math.exp(_mean([now[i] - old[i] for i in own]))
    return math.exp(_mean([held[i] - old[i] for i in own])) * math.exp(now[n] - held[n])


def slow_correction(
    rule: Correction, n: int, own: list[int], old: list[float], sampler: list[float]
) -> float:
    """The weight of token n."""
    if rule.mode.startswith("token"):
        ratio = math.exp(old[n] - sampler[n])
    else:
        gaps = [old[i] - sampler[i] for i in own]
        ratio = math.exp(sum(gaps) if rule.is_product else _mean(gaps))
    if rule.mode.endswith("truncate"):
        return min(max(ratio, rule.floor), rule.threshold)
    return ratio if rule.floor <= ratio <= rule.threshold else 0.0


def slow_future_kl(n: int, own: list[int], log_ratio: list[float], half_life: float) -> float:
    """The log ratios of token n and those after it, halved every `half_life` tokens."""
    return sum(log_ratio[i] * 0.5 ** ((i - n) / half_life) for i in own if i >= n)


def _influence(config, n, own, held, old, ratios, advantage):
    log_ratio = [h - o for h, o in zip(held, old, strict=True)]
    if config.delta is not None:
        log_ratio = [0.0 if r > config.delta else x for r, x in zip(ratios, log_ratio, strict=True)]
    weight = math.exp(slow_future_kl(n, own, log_ratio, config.fipo_decay_rate))
    if config.fipo_clip_range:
        low = 1.0 if config.fipo_clip_high_only else 1.0 - config.fipo_clip_range
        weight = min(max(weight, low), 1.0 + config.fipo_clip_range)
    limit = config.fipo_safety_threshold
    if limit is not None and advantage < 0 and ratios[n] > limit:
        weight = min(max(weight, 0.8), 1.0)
    return weight


def _phi(config: LossConfig, own, held, old, weights, advantage):
    log_w = sum(held[i] - old[i] + (0.0 if weights is None else math.log(max(weights[i], 1e-8))) for i in own)
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    k, rate = config.vespo_k[advantage < 0], config.vespo_lambda[advantage < 0]
    return math.exp(log_w) ** k * math.exp(rate * (1.0 - math.exp(log_w)))


def _policy(config, n, own, now, held, old, advantage, weights):
    ratio = _ratio(config, n, own, now, held, old)
    match config.loss_type:
        case "cispo":
            return -min(_ratio(config, n, own, held, held, old), config.epsilon_high) * advantage * now[n]
        case "sapo":
            tau = config.tau[0] if advantage > 0 else config.tau[1]
            return -advantage * 4.0 / tau / (1.0 + math.exp(-tau * (ratio - 1.0)))
        case "vespo":
            return -_phi(config, own, held, old, weights, advantage) * advantage * now[n]
    bounded = ratio if config.delta is None else min(ratio, config.delta)
    clipped = min(max(ratio, 1.0 - config.epsilon), 1.0 + config.epsilon_high)
    token = -min(bounded * advantage, clipped * advantage)
    if config.loss_type == "fipo":
        ratios = [_ratio(config, i, own, held, held, old) if i in own else 1.0 for i in range(len(now))]
        token *= _influence(config, n, own, held, old, ratios, advantage)
    return token


def _kl(config: LossConfig, now: float, reference: float, ratio: float) -> float:
    gap = reference - now
    value = {"k1": -gap, "k2": gap * gap / 2.0, "k3": math.exp(gap) - 1.0 - gap}[config.kl_estimator]
    return config.beta * value * (ratio if config.use_bias_correction_kl else 1.0)


def slow_loss(
    inputs: LossInputs, config: LossConfig, now: list[float], held: list[float], entropy: list[float]
) -> float:
    """The loss of `inputs` at logprobs `now` and entropies `entropy`, weights held at logprobs `held`."""
    d = inputs.denominators
    old = held if inputs.old_logprob_N is None else inputs.old_logprob_N.tolist()
    sampler = None if inputs.sampler_logprob_N is None else inputs.sampler_logprob_N.tolist()
    keep = [1.0] * len(now) if inputs.keep_N is None else inputs.keep_N.tolist()
    total = 0.0
    for own in _members(inputs):
        weights = None
        if config.correction is not None:
            weights = {n: slow_correction(config.correction, n, own, old, sampler) for n in own}
        for n in own:
            advantage = float(inputs.advantage_N[n])
            token = _policy(config, n, own, now, held, old, advantage, weights) * keep[n]
            if weights is not None and config.loss_type != "vespo":
                token *= weights[n]
            if config.off_policy_delta is not None and advantage < 0:
                token *= _mean([sampler[i] - held[i] for i in own]) <= config.off_policy_delta
            if config.beta:
                ratio = _ratio(config, n, own, now, held, old)
                token += _kl(config, now[n], float(inputs.ref_logprob_N[n]), ratio)
            divisor = {
                "grpo": d.num_episodes * len(own),
                "sapo": d.num_episodes * len(own),
                "luspo": d.num_episodes,
                "dr_grpo": d.num_episodes * d.max_completion_length,
            }.get(config.loss_type, d.num_tokens)
            total += token / divisor
    count = d.num_tokens if d.num_kept is None else d.num_kept
    return total - config.entropy_coef * sum(e * k for e, k in zip(entropy, keep, strict=True)) / count


def slow_value_and_slopes(inputs: LossInputs, config: LossConfig) -> tuple[float, Tensor, Tensor]:
    """The value, and the slopes by logprobs and by entropies, each (N,) float64."""
    here = inputs.logprob_N.detach().double().tolist()
    entropy = [0.0] * len(here) if inputs.entropy_N is None else inputs.entropy_N.detach().double().tolist()
    step = 1e-6

    def slope(n: int, of_entropy: bool) -> float:
        ends = []
        for sign in (1, -1):
            now, spread = here.copy(), entropy.copy()
            (spread if of_entropy else now)[n] += sign * step
            ends.append(slow_loss(inputs, config, now, here, spread))
        return (ends[0] - ends[1]) / (2 * step)

    slopes = [
        torch.tensor([slope(n, of) for n in range(len(here))], dtype=torch.float64) for of in (False, True)
    ]
    return slow_loss(inputs, config, here, here, entropy), *slopes


def random_step(config: LossConfig, seed: int) -> Case:
    """A micro-batch of 1 to 5 sequences of 1 to 6 tokens, with all that a loss may read."""
    rng = random.Random(f"{config}/{seed}")
    generator = torch.Generator().manual_seed(seed)
    counts = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    num = sum(counts)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num, generator=generator)

    logprob_N = -3.0 * torch.rand(num, generator=generator)
    sequence_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    old_N = rng.choice([None, logprob_N + noise(rng.choice([0.05, 0.7]))])
    keep_N = rng.choice([None, (torch.rand(num, generator=generator) < 0.7).float()])
    inputs = LossInputs(
        logprob_N=logprob_N.clone().requires_grad_(),
        old_logprob_N=old_N,
        ref_logprob_N=logprob_N + noise(0.7) if config.beta else None,
        advantage_N=torch.randn(len(counts), generator=generator)[sequence_N],
        sequence_N=sequence_N,
        trained_count_S=torch.tensor(counts),
        episode_count_S=torch.tensor(counts),
        denominators=Denominators(
            num_episodes=len(counts) + rng.randint(0, 3),
            num_tokens=num + rng.randint(0, 9),
            max_completion_length=rng.randint(6, 20),
            num_kept=None if keep_N is None else num + rng.randint(0, 5),
        ),
        sampler_logprob_N=(logprob_N if old_N is None else old_N) + noise(0.4),
        entropy_N=torch.rand(num, generator=generator).requires_grad_(),
        keep_N=keep_N,
    )
    return Case(inputs, config)


def micro_of(inputs: LossInputs, sequences: list[int]) -> LossInputs:
    """The micro-batch that holds `sequences` of a step, in this order, numbered from 0 as packing does."""
    places = [n for s in sequences for n, of in enumerate(inputs.sequence_N.tolist()) if of == s]
    index_N = torch.tensor(places, dtype=torch.long)

    def cut(value_N: Tensor | None) -> Tensor | None:
        return None if value_N is None else value_N[index_N]

    number = {s: i for i, s in enumerate(sequences)}
    return replace(
        inputs,
        logprob_N=inputs.logprob_N[index_N],
        old_logprob_N=cut(inputs.old_logprob_N),
        ref_logprob_N=cut(inputs.ref_logprob_N),
        advantage_N=inputs.advantage_N[index_N],
        sequence_N=torch.tensor([number[int(inputs.sequence_N[n])] for n in places], dtype=torch.long),
        trained_count_S=inputs.trained_count_S[sequences],
        episode_count_S=inputs.episode_count_S[sequences],
        sampler_logprob_N=cut(inputs.sampler_logprob_N),
        entropy_N=cut(inputs.entropy_N),
        keep_N=cut(inputs.keep_N),
    )
