"""Episodes of one or several rows, and each loss as a loop over episodes, rows and tokens in float64.

The loop is written from the table of docs/algorithms.md and from nothing else of covey.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.correction import Correction
from covey.algorithm.losses import LossConfig
from covey.types import AnnotatedSample, Outcome, Sample, TokenSequence, TrainSample

VOCABULARY, LONGEST = 5, 9


@dataclass(frozen=True)
class Row:
    """Trained tokens of one sequence: their logits (n, V), and all else that a loss reads."""

    logits_nV: Tensor
    targets: list[int]
    old: list[float]
    reference: list[float]
    sampler: list[float]
    keep: list[float]
    is_masked: bool
    # Of each token the ids that filters left; None for the whole vocabulary.
    sets: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class Episode:
    group: int
    advantage: float
    rows: list[Row]


def live(episode: Episode) -> list[Row]:
    return [row for row in episode.rows if not row.is_masked]


def random_episodes(seed: int, *, most_rows: int = 3) -> list[Episode]:
    """Twelve episodes of 1 to 3 rows of 1 to 5 tokens in four groups; one is masked as a whole, and of others
    a row is."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def row(is_masked: bool) -> Row:
        num = rng.randint(1, 5)
        logits_nV = torch.randn(num, VOCABULARY, generator=generator).double().requires_grad_()
        targets = [rng.randrange(VOCABULARY) for _ in range(num)]
        here = logits_nV.detach().log_softmax(-1)[range(num), targets]

        def near(scale: float) -> list[float]:
            noise = scale * torch.randn(num, generator=generator)
            return (here + noise).float().double().tolist()

        keep = [float(rng.random() < 0.7) for _ in range(num)]
        return Row(logits_nV, targets, near(0.25), near(0.7), near(0.5), keep, is_masked)

    episodes = []
    for number in range(12):
        num_rows = 1 + number % most_rows
        is_masked = [number == 7 or (num_rows > 1 and rng.random() < 0.3) for _ in range(num_rows)]
        advantage = float(torch.tensor(rng.choice([-1, 1]) * rng.uniform(0.2, 2.0), dtype=torch.float32))
        episodes.append(Episode(number // 3, advantage, [row(on) for on in is_masked]))
    return episodes


# -- the loop ----------------------------------------------------------------------------------------------


def loop_weight(loss_type: str, episodes: Sequence[Episode], episode: Episode, longest: int) -> float:
    """What every token of an episode is weighed with."""
    own = sum(len(row.targets) for row in live(episode))
    tokens = sum(len(row.targets) for other in episodes for row in live(other))
    match loss_type:
        case "grpo" | "sapo":
            return 1.0 / (len(episodes) * own)
        case "luspo":
            return 1.0 / len(episodes)
        case "dr_grpo":
            return 1.0 / (len(episodes) * longest)
    return 1.0 / tokens


def loop_correction(rule: Correction, gaps: list[float], n: int) -> float:
    """The weight of token n of a row, whose logprobs have these gaps to the sampler's."""
    gap = gaps[n]
    if rule.mode.startswith("sequence"):
        gap = sum(gaps) if rule.is_product else sum(gaps) / len(gaps)
    ratio = float(torch.tensor(gap, dtype=torch.float64).exp())
    if rule.mode.endswith("truncate"):
        return min(max(ratio, rule.floor), rule.threshold)
    return ratio if rule.floor <= ratio <= rule.threshold else 0.0


def loop_ratio(config: LossConfig, log_r: list[Tensor], n: int) -> Tensor:
    mean = torch.stack(log_r).mean()
    match config.importance_sampling_level:
        case "token":
            return log_r[n].exp()
        case "sequence":
            return mean.exp()
    return mean.detach().exp() * (log_r[n] - log_r[n].detach()).exp()


def loop_policy(
    config: LossConfig, a: float, logp: list[Tensor], log_r: list[Tensor], weights: list[float], n: int
) -> Tensor:
    """What token n of a row adds, but for masks and the KL term."""
    r = loop_ratio(config, log_r, n)
    if config.loss_type == "cispo":
        return -r.detach().clamp(max=config.epsilon_high) * a * logp[n]
    if config.loss_type == "sapo":
        tau = config.tau[0] if a > 0 else config.tau[1]
        return -a * (4.0 / tau) * torch.sigmoid(tau * (r - 1.0))
    if config.loss_type == "vespo":
        k, rate = config.vespo_k[a < 0], config.vespo_lambda[a < 0]
        log_w = sum(float(x.detach()) for x in log_r) + sum(
            float(torch.tensor(max(w, 1e-8), dtype=torch.float64).log()) for w in weights
        )
        w = torch.tensor(log_w, dtype=torch.float64).exp()
        return -(w**k * torch.exp(rate * (1.0 - w))) * a * logp[n]
    bounded = r if config.delta is None else r.clamp(max=config.delta)
    term = -torch.minimum(bounded * a, r.clamp(1.0 - config.epsilon, 1.0 + config.epsilon_high) * a)
    if config.loss_type == "fipo":
        ahead = sum(
            float(log_r[m].detach()) * 0.5 ** ((m - n) / config.fipo_decay_rate)
            for m in range(n, len(log_r))
            if config.delta is None or float(loop_ratio(config, log_r, m).detach()) <= config.delta
        )
        influence = float(torch.tensor(ahead, dtype=torch.float64).exp())
        influence = min(max(influence, 1.0), 1.0 + config.fipo_clip_range)
        if a < 0 and float(r.detach()) > config.fipo_safety_threshold:
            influence = min(max(influence, 0.8), 1.0)
        term = term * influence
    return term


def loop_kl(config: LossConfig, logp: Tensor, reference: float, ratio: Tensor) -> Tensor:
    d = reference - logp
    value = {"k1": -d, "k2": d * d / 2.0, "k3": d.exp() - d - 1.0}[config.kl_estimator]
    return config.beta * value * (ratio if config.use_bias_correction_kl else 1.0)


def loop_real(episodes: Sequence[Episode], scores: dict[int, Tensor]) -> Tensor:
    """The mean over groups; `scores` are of the episodes in the loss, by number."""
    groups = {episode.group for episode in episodes}
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        here = [(episodes[i].advantage > 0, s) for i, s in scores.items() if episodes[i].group == group]
        good, others = [s for is_good, s in here if is_good], [s for is_good, s in here if not is_good]
        if good and others:
            total = total + torch.log(1.0 + torch.stack(others).exp().sum())
            total = total + torch.log(1.0 + (-torch.stack(good)).exp().sum())
    return total / len(groups)


def within(row: Row, n: int) -> Tensor:
    """The logprobs (V,) that token n of a row was drawn by."""
    logits_V = row.logits_nV[n]
    if row.sets is not None:
        outside_V = torch.ones(len(logits_V), dtype=torch.bool)
        outside_V[list(row.sets[n])] = False
        logits_V = logits_V.masked_fill(outside_V, -torch.inf)
    return logits_V.log_softmax(-1)


def loop_loss(
    episodes: Sequence[Episode], config: LossConfig, *, has_keep: bool, longest: int = LONGEST
) -> Tensor:
    """The loss of the whole step; `longest` is max_completion_length."""
    total = torch.zeros((), dtype=torch.float64)
    scores: dict[int, Tensor] = {}
    entropies = []
    for number, episode in enumerate(episodes):
        for row in live(episode):
            table = row.logits_nV.log_softmax(-1)
            logp = [within(row, n)[target] for n, target in enumerate(row.targets)]
            log_r = [p - old for p, old in zip(logp, row.old, strict=True)]
            held = [float(p.detach()) for p in logp]
            scores[number] = torch.stack(log_r).mean() / config.real_tau
            lost = sum(s - p for s, p in zip(row.sampler, held, strict=True)) / len(held)
            weights = [1.0] * len(logp)
            if config.correction is not None:
                gaps = [old - s for old, s in zip(row.old, row.sampler, strict=True)]
                weights = [loop_correction(config.correction, gaps, n) for n in range(len(gaps))]
            for n in range(len(logp)):
                token = torch.zeros((), dtype=torch.float64)
                if config.loss_type != "real":
                    token = loop_policy(config, episode.advantage, logp, log_r, weights, n)
                    if config.loss_type != "vespo":
                        token = token * weights[n]
                    if has_keep:
                        token = token * row.keep[n]
                    if config.off_policy_delta is not None and episode.advantage < 0:
                        token = token * float(lost <= config.off_policy_delta)
                if config.beta:
                    token = token + loop_kl(config, logp[n], row.reference[n], loop_ratio(config, log_r, n))
                total = total + token * loop_weight(config.loss_type, episodes, episode, longest)
                entropies.append(-(table[n].exp() * table[n]).sum() * (row.keep[n] if has_keep else 1.0))
    if config.loss_type == "real":
        total = total + loop_real(episodes, scores)
    if config.entropy_coef:
        kept = sum(sum(row.keep) for e in episodes for row in live(e)) if has_keep else len(entropies)
        total = total - config.entropy_coef * torch.stack(entropies).sum() / kept
    return total


def train_samples(episodes: Sequence[Episode]) -> list[TrainSample]:
    """Rows that begin with their group's prompt; from the second on, an untrained history follows it."""
    out = []
    for number, episode in enumerate(episodes):
        for place, row in enumerate(episode.rows):
            num, history = len(row.targets), [7] * place
            sample = Sample(
                group=episode.group,
                sibling=number % 3,
                episode=number,
                sequence=place,
                tokens=TokenSequence.behind(
                    2,
                    token_ids=(8, episode.group, *history, *row.targets),
                    is_trained=(False,) * (2 + place) + (True,) * num,
                    logprobs=tuple(row.sampler),
                    versions=((0, num),),
                ),
                temperature=1.0,
                outcome=Outcome.SCORED,
            )
            annotated = AnnotatedSample(
                sample=sample, old_logprob_N=torch.tensor(row.old), ref_logprob_N=torch.tensor(row.reference)
            )
            out.append(
                TrainSample(
                    annotated=annotated,
                    advantage=episode.advantage,
                    loss_mask=(not row.is_masked,) * num,
                    masked="truncated" if row.is_masked else None,
                    needs_forward=not row.is_masked,
                )
            )
    return out
