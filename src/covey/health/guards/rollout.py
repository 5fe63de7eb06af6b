"""Check a rollout for what no healthy run has, before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from covey.health.guard import Guard
from covey.health.saved import NEWEST
from covey.health.words import broken
from covey.texts import joined, tr
from covey.types import (
    Episode,
    Fix,
    Group,
    Sample,
    ScoredGroup,
    TokenSequence,
    TrainSample,
)

if TYPE_CHECKING:
    from torch import Tensor

# A healthy rollout is stopped for repeating itself with a probability below e^-25, 1e-11.
_EVIDENCE = 25.0
# Shares of siblings that a fault may copy.
_COPIED = (0.5, 0.125)
_TINY = 1e-300
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """What a rollout is held to.

    The step that it is for, siblings of a prompt, episodes in all, whether advantages are in units of the
    spread of their group or of the rollout, whether they are compared over the whole rollout, the policy
    version that learns (None: replayed), how many versions before it may have sampled a token, the number of
    the rollout, and the numbers of the groups that were sampled for an earlier one. An environment or a
    function `makes_prompts` of its own, and may begin each episode of a group in its own way.
    """

    step: int
    num_generations: int
    num_episodes: int
    scaled_by: Literal["group", "rollout"] | None
    is_over_rollout: bool
    version: int | None
    rollout: int = 0
    max_age: int = 0
    stale: frozenset[int] = frozenset()
    makes_prompts: bool = False
    starts_differ: bool = False


def check_rollout(groups: Sequence[ScoredGroup], rows: Sequence[TrainSample], facts: RolloutFacts) -> None:
    """Raise GuardStop where a rollout contradicts itself or its plan.

    F110: ids that were not sampled. F111: tokens missing from the loss. F112: groups that are not whole.
    F113: advantages that no rewards can give. F114: tokens of another policy version. F118: numbers that are
    not finite. F122: rows beside the plan. F125: siblings that repeat each other.
    """
    episodes = [e for g in groups for e in g.group.episodes]
    if facts.version is not None and len(episodes) != facts.num_episodes:
        seen = tr(
            "a rollout has {num_rows} completions, but {planned} were planned",
            num_rows=len(episodes),
            planned=facts.num_episodes,
        )
        raise broken("F122", facts.step, seen, tr("Completions were lost or added after sampling."))
    _check_groups(groups, facts)
    totals = [s.total for g in groups for s in g.scores]
    for row in rows:
        number = row.annotated.sample.episode
        _check_row(row, episodes[number], facts)
        _check_finite(row, totals[number], facts.step)
    _check_place(groups, facts)
    _check_advantages(groups, rows, facts)
    if facts.version is not None:
        _check_repeats(groups, facts.step)


def _check_place(groups: Sequence[ScoredGroup], facts: RolloutFacts) -> None:
    """Raise GuardStop (F122) where a group was sampled for another rollout, and not replayed."""
    if facts.version is None:
        return
    found = {g.group.prompt.origin.rollout for n, g in enumerate(groups) if n not in facts.stale}
    if others := sorted(found - {facts.rollout}):
        seen = tr(
            "rollout {rollout} has groups that were sampled for rollout {other}",
            rollout=facts.rollout,
            other=others[0],
        )
        raise broken("F122", facts.step, seen, tr("Rollouts were taken out of their order, or one twice."))


def refuse_other_versions(groups: Sequence[ScoredGroup], version: int) -> None:
    """Raise GuardStop (F114) where an evaluation of `version` holds tokens of another one."""
    versions = {v for g in groups for e in g.group.episodes for v in e.versions}
    if versions - {version}:
        seen = tr(
            "an evaluation was sampled by policy version {versions}, but the policy is at version {version}",
            versions=min(versions),
            version=version,
        )
        raise broken(
            "F114", version, seen, tr("The engine did not get the weights of the last optimizer step.")
        )


def _check_groups(groups: Sequence[ScoredGroup], facts: RolloutFacts) -> None:
    for number, scored in enumerate(groups):
        group = scored.group
        siblings = [e.id.sibling for e in group.episodes]
        prompts = {e.sequences[0].prompt_digest for e in group.episodes if e.sequences}
        if len(siblings) != group.planned or len(set(siblings)) != len(siblings):
            seen = tr(
                "group {number} has the completions {siblings}, but {planned} were planned",
                number=number,
                siblings=siblings,
                planned=group.planned,
            )
        elif facts.version is not None and group.planned != facts.num_generations:
            seen = tr(
                "group {number} has {planned} completions, not {num_generations}",
                number=number,
                planned=group.planned,
                num_generations=facts.num_generations,
            )
        elif not _may_differ(group, facts) and not prompts <= (own := {group.prompt.digest}):
            seen = tr(
                "group {number} has completions of {num_prompts} different prompts",
                number=number,
                num_prompts=len(prompts | own),
            )
        else:
            continue
        raise broken("F112", facts.step, seen, tr("Completions were sorted into the wrong groups."))


def _may_differ(group: Group, facts: RolloutFacts) -> bool:
    """Return whether the prompts are not those of the data, in this run or in the one that is replayed."""
    return facts.makes_prompts or (facts.version is None and any(e.turns for e in group.episodes))


def _check_row(row: TrainSample, episode: Episode, facts: RolloutFacts) -> None:
    sample = row.annotated.sample
    name = tr("completion {sibling} of group {group}", sibling=sample.sibling, group=sample.group)
    # An episode without a sequence has an empty row.
    written = episode.sequences[sample.sequence] if episode.sequences else None
    num_sampled = 0 if written is None else written.num_trained
    if sample.is_held and isinstance(written, TokenSequence):
        _check_ids(name, sample, written, facts.step)
    if row.masked is None and row.num_tokens != num_sampled:
        seen = tr(
            "{name}: {num_sampled} tokens were sampled, but the loss covers {loss_mask}",
            name=name,
            num_sampled=num_sampled,
            loss_mask=row.num_tokens,
        )
        raise broken(
            "F111",
            facts.step,
            seen,
            tr("The mask is shorter than the completion; most often the EOS token is missing."),
        )
    versions = {written.oldest_version, written.newest_version} if written and num_sampled else set[int]()
    if facts.version is not None and sample.group in facts.stale:
        if max(versions, default=-1) >= facts.version:
            seen = tr(
                "{name} is replayed, but was sampled by policy version {versions}, which is not an older one",
                name=name,
                versions=max(versions),
            )
            raise broken(
                "F114", facts.step, seen, tr("A group of this rollout was mistaken for an older one.")
            )
    elif facts.version is not None and versions - {*range(facts.version - facts.max_age, facts.version + 1)}:
        seen = tr(
            "{name} was sampled by policy version {versions}, but the policy is at version {version}",
            name=name,
            versions=min(versions),
            version=facts.version,
        )
        cause = tr("The weights were not published to the engine after the last optimizer step.")
        if facts.max_age:
            seen = tr(
                "{name} was sampled by policy versions {oldest} to {newest}, but the policy is at version "
                "{version}, and max_staleness allows it {max_age} older ones",
                name=name,
                oldest=min(versions),
                newest=max(versions),
                version=facts.version,
                max_age=facts.max_age,
            )
            cause = tr("A rollout was begun too early, or the engine counts its versions wrongly.")
        raise broken("F114", facts.step, seen, cause)


def _check_ids(name: str, sample: Sample, written: TokenSequence, step: int) -> None:
    """Raise GuardStop (F110) where other tokens would be trained than were sampled."""
    trained, sampled = sample.token_ids[sample.is_trained].tolist(), written.trained_ids.tolist()
    if trained == sampled:
        return
    differs_at = next((i for i, (a, b) in enumerate(zip(trained, sampled, strict=False)) if a != b), None)
    where = (
        tr("they differ from token {differs_at} on", differs_at=differs_at)
        if differs_at is not None
        else tr("one is the beginning of the other")
    )
    seen = tr(
        "{name}: {num_sampled} tokens were sampled, but {num_trained} other tokens would be trained; {where}",
        name=name,
        num_sampled=len(sampled),
        num_trained=len(trained),
        where=where,
    )
    raise broken("F110", step, seen, tr("Text was decoded and encoded again, or a mask is shifted."))


def _check_finite(row: TrainSample, total: float | None, step: int) -> None:
    annotated = row.annotated
    name = tr(
        "completion {sibling} of group {group}",
        sibling=annotated.sample.sibling,
        group=annotated.sample.group,
    )
    numbers: dict[str, bool] = {
        "its reward": total is None or math.isfinite(total),
        "its sampler's logprobs": math.isfinite(annotated.sample.tokens.logprob_sum),
        "its advantage": all(map(math.isfinite, (row.advantage, *row.advantages.tolist()))),
        "its old logprobs": _is_finite(annotated.old_logprob_N),
        "its reference logprobs": _is_finite(annotated.ref_logprob_N),
    }
    lost = [what for what, fine in numbers.items() if not fine]
    if lost:
        cause = tr("The weights contain NaN or infinity, or the logits overflow.")
        fixes = (
            NEWEST,
            Fix(text="float32", edits={"torch_dtype": "float32"}),
        )
        raise broken(
            "F118",
            step,
            tr("{name}: {lost} not finite", name=name, lost=joined(tr(" and "), lost)),
            cause,
            *fixes,
        )


def _is_finite(values_N: Tensor | None) -> bool:
    return values_N is None or bool(values_N.isfinite().all())


def _check_advantages(
    groups: Sequence[ScoredGroup], rows: Sequence[TrainSample], facts: RolloutFacts
) -> None:
    """Advantages that are compared with each other add up to 0, and of N of them none is above (N - 1) /
    sqrt(N) sample deviations.

    That is reached where one reward of N differs from all others. Where steps have rewards, the first token
    of a completion has the sum of all of its steps: these add up to 0, and have no such bound.
    """
    from covey.batching.credit import UNSCORED

    values = [
        [_first_advantage(r) for r in members if r.masked not in UNSCORED]
        for members in _members(groups, rows)
    ]
    is_bounded = all(s.steps is None for g in groups for s in g.scores)
    everything = [v for group in values for v in group]
    compared: dict[int | None, list[float]] = {None: everything}
    if not facts.is_over_rollout:
        compared = dict(enumerate(values))
    for number, together in compared.items():
        largest = max((abs(v) for v in together), default=0.0)
        total = sum(together)
        if abs(total) > _ROUNDING * max(1.0, largest) * len(together):
            seen = tr(
                "the {num_together} advantages of group {number} add up to {total:.4g}, not to 0",
                num_together=len(together),
                number=number,
                total=total,
            )
            if number is None:
                seen = tr(
                    "the {num_together} advantages of the rollout add up to {total:.4g}, not to 0",
                    num_together=len(together),
                    total=total,
                )
            raise broken(
                "F113", facts.step, seen, tr("Rewards of several groups were mixed, or rows were left out.")
            )
        if facts.scaled_by == "group" and is_bounded:
            _check_largest(together, number, facts.step)
    if facts.scaled_by == "rollout" and is_bounded:
        _check_largest(everything, None, facts.step)


def _members(groups: Sequence[ScoredGroup], rows: Sequence[TrainSample]) -> list[list[TrainSample]]:
    members: list[list[TrainSample]] = [[] for _ in groups]
    for row in rows:
        # An episode has one advantage, whatever the number of its rows.
        if row.annotated.sample.sequence == 0:
            members[row.annotated.sample.group].append(row)
    return members


def _first_advantage(row: TrainSample) -> float:
    return float(row.advantages[0]) if len(row.loss_mask) else row.advantage


def _check_largest(values: Sequence[float], number: int | None, step: int) -> None:
    largest = max((abs(v) for v in values), default=0.0)
    bound = (len(values) - 1) / math.sqrt(len(values)) if values else 0.0
    if largest > bound * (1 + _ROUNDING):
        seen = tr(
            "an advantage of group {number} is {largest:.4g}, but {num_values} rewards allow at "
            "most {bound:.4g}",
            number=number,
            largest=largest,
            num_values=len(values),
            bound=bound,
        )
        if number is None:
            seen = tr(
                "an advantage of the rollout is {largest:.4g}, but {num_values} rewards allow at "
                "most {bound:.4g}",
                largest=largest,
                num_values=len(values),
                bound=bound,
            )
        raise broken(
            "F113", step, seen, tr("The rewards were divided by the standard deviation of other rewards.")
        )


def _check_repeats(groups: Sequence[ScoredGroup], step: int) -> None:
    """Siblings are equal as often as their own probabilities say.

    Of a group's first completion the other siblings are copies with its probability p, independently. The
    likelihood of the copies found if a share of siblings were copied, over that under p, has mean 1 on a
    healthy run, group by group, so the product over groups exceeds e^x with probability e^-x (Markov).
    """
    evidence, copies, others = 0.0, 0, 0
    for scored in groups:
        first, *rest = scored.group.episodes
        p = math.exp(min(-1e-9, sum(s.logprob_sum for s in first.sequences)))
        equal = sum(_digests(e) == _digests(first) for e in rest)
        alternatives = [(share, p + share * (1 - p)) for share in _COPIED]
        ratios = [
            equal * math.log(q / max(p, _TINY)) + (len(rest) - equal) * math.log(1 - share)
            for share, q in alternatives
        ]
        evidence += max(ratios) - math.log(len(_COPIED))
        copies, others = copies + equal, others + len(rest)
    if evidence > _EVIDENCE:
        seen = tr(
            "{copies} of {others} completions repeat the first completion of their prompt token by "
            "token; by their own probabilities the chance of this is below e^-{evidence:.0f}",
            copies=copies,
            others=others,
            evidence=evidence,
        )
        cause = tr(
            "The completions of a prompt were sampled with the same seed, came from a cache, or "
            "sampling is greedy."
        )
        raise broken("F125", step, seen, cause)


def _digests(episode: Episode) -> tuple[int, ...]:
    """Return the digest of each sequence: equal completions have equal ones on every rank."""
    return tuple(s.digest for s in episode.sequences)


GUARD = Guard(place=3, of_rollout=lambda seen: check_rollout(seen.groups, seen.rows, seen.facts))
