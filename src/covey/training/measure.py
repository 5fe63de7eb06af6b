"""What a rollout says of itself: rewards, lengths, signal, and how far the sampler is from the learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import fsum
from statistics import fmean, stdev

from covey.data.text import TextCodec
from covey.health.completions import Said, completion_metrics
from covey.health.names import UNKNOWN_IDS
from covey.rollout.collect import Collected
from covey.rollout.publisher import Published
from covey.rollout.repetition import is_repetitive
from covey.telemetry.files import RESERVED
from covey.types import (
    Episode,
    Metric,
    Outcome,
    Sample,
    Score,
    ScoredGroup,
    SequenceSummary,
    StepResult,
    TokenSequence,
    TrainSample,
)


def rollout_metrics(
    collected: Collected, rows: Sequence[TrainSample], version: int, codec: TextCodec
) -> dict[str, Metric]:
    """Metrics of a whole rollout, under TRL's names where TRL has the thing."""
    groups = collected.groups
    samples = [r.annotated.sample for r in rows]
    episodes = [e for g in groups for e in g.group.episodes]
    num_tokens = sum(s.num_trained for s in samples)
    ages = [version - s.tokens.oldest_version for s in samples if s.num_trained]
    present = [g for g in map(_without_lost, groups) if g.scores]
    return {
        **reward_metrics(groups),
        **length_metrics(episodes),
        **outcome_metrics(episodes),
        **turn_metrics(episodes),
        **id_metrics(episodes, codec),
        **task_metrics(groups, collected.tasks),
        **completion_metrics(
            [[_said(e) for e in g.group.episodes] for g in present],
            [s.extras.get("parsed_by") for g in present for s in g.scores],
            [g.group.prompt.id for g in present],
            [[s.total for s in g.scores] for g in present],
        ),
        "entropy_sampled": _entropy_sampled(samples),
        "policy_age": Metric(value=max(ages, default=0), count=num_tokens),
        "rows/masked": Metric(value=sum(r.masked is not None for r in rows), count=len(rows)),
        "rows/invalid": Metric(value=sum(r.masked == "invalid" for r in rows), count=len(rows)),
        "rows/skipped": Metric(value=sum(not r.needs_forward for r in rows), count=len(rows)),
        "time/rollout_s": Metric(value=collected.rollout_s),
        "time/reward_s": Metric(value=collected.reward_s),
        **_selection_metrics(collected, version),
        **collected.metrics,
    }


def publish_metrics(last: Published | None) -> dict[str, Metric]:
    """What it took to give the engine the weights that sampled; nothing where it samples from the
    learner's."""
    if last is None:
        return {}
    return {
        "time/publish_s": Metric(value=last.seconds),
        "publish/bytes": Metric(value=last.num_bytes),
        "publish/canary_gap": Metric(value=last.canary_gap),
    }


def _selection_metrics(collected: Collected, version: int) -> dict[str, Metric]:
    """What was sampled and left out, where groups are selected: the metrics of rewards are of those that are
    learnt from, and under sampled/ of all that the newest policy has sampled."""
    selection = collected.selection
    if selection is None:
        return {}
    num, stale = len(collected.groups), collected.stale
    sampled_by = [
        {v for e in g.group.episodes for v in e.versions}
        for i, g in enumerate(collected.groups)
        if i in stale
    ]
    # A group that sampled no token has no age.
    ages = [version - min(versions) for versions in sampled_by if versions]
    counts = {f"select/dropped_{why}": len(ids) for why, ids in selection.dropped.items()}
    counts |= {"select/attempts": selection.attempts, "select/without_signal": selection.num_silent}
    return {
        **{f"sampled/{name}": metric for name, metric in reward_metrics(selection.sampled).items()},
        **{name: Metric(value=value, count=len(selection.sampled)) for name, value in counts.items()},
        "select/frac_signal": Metric(value=1 - (selection.num_silent + len(stale)) / num, count=num),
        "select/replayed": Metric(value=len(stale), count=num),
        "select/replayed_age": _mean(ages),
    }


def length_metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Compute the lengths of completions in tokens of the model and how many were cut, without lost ones."""
    present = [e for e in episodes if e.outcome is not Outcome.INFRASTRUCTURE]
    lengths = [e.num_trained for e in present]
    ended = [e.num_trained for e in present if e.outcome is Outcome.SCORED]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": Metric(value=min(lengths, default=None), count=len(lengths)),
        "completions/max_length": Metric(value=max(lengths, default=None), count=len(lengths)),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": Metric(value=min(ended, default=None), count=len(ended)),
        "completions/max_terminated_length": Metric(value=max(ended, default=None), count=len(ended)),
        "completions/clipped_ratio": _mean([float(e.outcome is Outcome.TRUNCATED) for e in present]),
    }


def _without_lost(scored: ScoredGroup) -> ScoredGroup:
    """The group with those of its episodes that an infrastructure failure has not cost."""
    pairs = list(zip(scored.group.episodes, scored.scores, strict=True))
    kept = [(e, s) for e, s in pairs if e.outcome is not Outcome.INFRASTRUCTURE]
    group = replace(scored.group, episodes=tuple(e for e, _ in kept))
    return ScoredGroup(group=group, scores=tuple(s for _, s in kept))


def outcome_metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """How many episodes ended in each way."""
    counts = Counter(e.outcome for e in episodes)
    return {
        f"outcome/{outcome.name.lower()}": Metric(value=counts[outcome], count=len(episodes))
        for outcome in Outcome
    }


def turn_metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Count turns and calls of tools, under TRL's names where it has them; nothing without tools and
    environment.

    `turn_length` is in tokens of the model; `tools/call_frequency` is in calls an episode,
    `tools/failure_frequency` the share of them that failed.
    """
    present = [e for e in episodes if e.outcome is not Outcome.INFRASTRUCTURE]
    num_turns, num_calls = sum(e.counts.num_turns for e in present), sum(e.counts.num_calls for e in present)
    if not num_turns:
        return {}
    failed = sum(e.counts.num_failed_calls for e in present)
    num_tokens = sum(e.num_trained for e in present)
    return {
        "num_turns": _mean([float(e.counts.num_turns) for e in present]),
        "turn_length": Metric(value=num_tokens / num_turns if num_turns else None, count=num_turns),
        "tools/call_frequency": _mean([float(e.counts.num_calls) for e in present]),
        "tools/failure_frequency": Metric(value=failed / num_calls if num_calls else 0.0, count=num_calls),
    }


def id_metrics(episodes: Sequence[Episode], codec: TextCodec) -> dict[str, Metric]:
    """The share of the model's tokens whose ids the tokenizer does not have."""
    num_tokens = sum(e.num_trained for e in episodes)
    every = [s for e in episodes for s in e.sequences]
    here = [i for s in every if isinstance(s, TokenSequence) for i in s.trained_ids.tolist()]
    elsewhere = sum(s.num_unknown for s in every if isinstance(s, SequenceSummary))
    num_unknown = codec.num_unknown(here) + elsewhere
    return {UNKNOWN_IDS: Metric(value=num_unknown / num_tokens if num_tokens else None, count=num_tokens)}


def _said(episode: Episode) -> Said:
    """Describe an episode for comparison, on ranks with and without its tokens."""
    known = [s for s in episode.sequences if isinstance(s, SequenceSummary)]
    return Said(
        length=episode.num_trained,
        key=tuple(s.digest for s in episode.sequences),
        is_repetitive=lambda: known[0].is_repetitive if known else is_repetitive(episode.trained_ids),
    )


def _entropy_sampled(samples: Sequence[Sample]) -> Metric:
    """The mean of the sampler's logprobs, negated: an estimate of its entropy, in nats."""
    num_tokens = sum(s.num_trained for s in samples)
    total = -fsum(s.tokens.logprob_sum for s in samples)
    return Metric(value=total / num_tokens if num_tokens else None, count=num_tokens)


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Totals, their spread within groups, and each reward by name."""
    totals = [s.total for g in groups for s in g.scores if s.total is not None]
    by_group = [[s.total for s in g.scores if s.total is not None] for g in groups]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in by_group]
    flat = sum(not _differs(g.scores) for g in groups)
    metrics = {
        "reward": _mean(totals),
        "reward_std": _mean(spreads),
        "frac_reward_zero_std": Metric(value=flat / len(groups), count=len(groups)),
    }
    parts: dict[str, list[float]] = {}
    for score in (s for g in groups for s in g.scores):
        for part in score.parts:
            found = parts.setdefault(part.name, [])
            if part.value is not None:
                found.append(part.value)
    for name, values in parts.items():
        metrics[f"rewards/{name}/mean"] = _mean(values)
        spread = stdev(values) if len(values) > 1 else None
        metrics[f"rewards/{name}/std"] = Metric(value=spread, count=len(values))
    return metrics


def task_metrics(groups: Sequence[ScoredGroup], tasks: Mapping[str, Collection[str]]) -> dict[str, Metric]:
    """Rewards and lengths of each task as tasks/<task>/…; the names are the same for every rollout, and the
    values None where it had no row of the task.

    `tasks` names the rewards that score a task; with none it is all of them.
    """
    found: dict[str, Metric] = {}
    for task, rewards in tasks.items():
        own = [g for g in groups if g.group.prompt.task == task]
        some = own or groups
        values = {**reward_metrics(some), **length_metrics([e for g in some for e in g.group.episodes])}
        for name, metric in values.items():
            of_reward = name.removeprefix("rewards/").removesuffix("/mean")
            if not name.startswith("rewards/") or (
                name.endswith("/mean") and (not rewards or of_reward in rewards)
            ):
                found[f"tasks/{task}/{name}"] = metric if own else Metric(value=None, count=0)
    return found


def _differs(scores: Sequence[Score]) -> bool:
    """Whether a group's completions, or any of their steps, have different rewards."""
    outcomes = {s.total if s.steps is None else s.steps.outcome for s in scores if s.total is not None}
    steps: dict[str, set[float]] = {}
    for part in (p for s in scores if s.steps is not None for p in s.parts):
        steps.setdefault(part.name, set()).update(part.steps or ())
    return len(outcomes - {None}) > 1 or any(len(numbers) > 1 for numbers in steps.values())


def _mean(values: Sequence[float]) -> Metric:
    return Metric(value=fmean(values) if values else None, count=len(values))


def with_users(own: Mapping[str, Metric], users: Mapping[str, Metric]) -> dict[str, Metric]:
    """covey's metrics and those that rewards log; one under a name that is taken stands under user/NAME."""

    def is_taken(name: str) -> bool:
        return name in own or name in RESERVED or name.startswith("eval_")

    return {**{f"user/{n}" if is_taken(n) else n: m for n, m in users.items()}, **own}


def step_metrics(result: StepResult) -> dict[str, Metric]:
    """Metrics of one optimizer step; a skipped step has no gradient, which is not a gradient of 0."""
    stats = result.stats
    return {
        **result.metrics,
        "grad_norm": Metric(value=None if stats is None else stats.grad_norm),
        "grad_norm_clipped": Metric(value=None if stats is None else stats.grad_norm_clipped),
        "learning_rate": Metric(value=None if stats is None else stats.learning_rate),
        "update_ratio": Metric(value=None if stats is None else stats.update_ratio),
        "frac_params_changed": Metric(value=None if stats is None else stats.frac_params_changed),
    }
