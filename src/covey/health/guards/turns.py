"""Check that episodes of several turns are trained on what was sampled, each turn once, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from covey.codes import Code
from covey.health.guard import Guard
from covey.health.guards.rollout import RolloutFacts
from covey.health.words import broken
from covey.texts import tr
from covey.types import Episode, Fix, ScoredGroup, Source, TrainSample
from covey.types.episode import digest_of


def check_turns(groups: Sequence[ScoredGroup], rows: Sequence[TrainSample], facts: RolloutFacts) -> None:
    """Raise GuardStop where turns, tokens and rows contradict each other; tokens on the rank that has them.

    F110: what a tool or an environment wrote would be trained, or a turn has other tokens than were sampled.
    F111: a turn or a sequence is missing. F113: the sequences of an episode have different advantages. F143:
    the episodes of a group began differently. F144: two turns of an episode were drawn with the same noise.
    """
    for number, scored in enumerate(groups):
        if facts.makes_prompts and not facts.starts_differ:
            _check_starts(number, scored, facts.step)
        for episode in scored.group.episodes:
            if episode.turns:
                sibling = episode.id.sibling
                name = tr("completion {sibling} of group {group}", sibling=sibling, group=number)
                _check_sources(name, episode, facts.step)
                _check_episode(name, episode, facts.step)
    _check_rows(groups, rows, facts.step)


def _check_rows(groups: Sequence[ScoredGroup], rows: Sequence[TrainSample], step: int) -> None:
    """Raise GuardStop where an episode has not one row a sequence, or rows of different advantages."""
    of_episode: dict[tuple[int, int], list[TrainSample]] = {}
    for row in rows:
        sample = row.annotated.sample
        of_episode.setdefault((sample.group, sample.sibling), []).append(row)
    for number, scored in enumerate(groups):
        for sibling, (episode, score) in enumerate(zip(scored.group.episodes, scored.scores, strict=True)):
            own = of_episode.get((number, sibling), [])
            name = tr("completion {sibling} of group {group}", sibling=sibling, group=number)
            numbers = sorted(row.annotated.sample.sequence for row in own)
            if numbers != list(range(len(episode.sequences) or 1)):
                seen = tr(
                    "{name}: it has {num_sequences} sequences, but the rows {rows} of it would be trained",
                    name=name,
                    num_sequences=len(episode.sequences),
                    rows=numbers,
                )
                raise broken(
                    "F111", step, seen, tr("A sequence of an episode was lost on its way to the loss.")
                )
            # Where steps have rewards, a row has the advantages of its own steps.
            if score.steps is None and len({row.advantage for row in own}) > 1:
                seen = tr(
                    "{name}: its {num_rows} rows have different advantages", name=name, num_rows=len(own)
                )
                raise broken("F113", step, seen, tr("Advantages were given to rows of other episodes."))


def _check_starts(number: int, scored: ScoredGroup, step: int) -> None:
    starts = {e.sequences[0].prompt_digest for e in scored.group.episodes if e.sequences}
    if len(starts) < 2:
        return
    seen = tr(
        "the {num} episodes of group {group} began in {num_starts} different ways",
        num=len(scored.group.episodes),
        group=number,
        num_starts=len(starts),
    )
    cause = tr(
        "reset() of the environment, or a scheduler before its first request, draws random numbers that "
        "are not seeded, such as those of a service. covey seeds random, numpy and torch, and passes the "
        "argument seed to a reset() that has one. Or rollout_func has returned other prompt_ids for some of "
        "them."
    )
    raise broken(
        "F143",
        step,
        seen,
        cause,
        Fix(text=tr("draw them from the argument seed of reset(self, row, seed), equal for a group")),
        Fix(text=tr("let each episode begin in its own way"), edits={"environment_starts": "differ"}),
    )


def _check_sources(name: str, episode: Episode, step: int) -> None:
    for sequence in episode.tokens:
        start = 0
        for source, count in sequence.sources:
            num = int(sequence.is_trained[start : start + count].sum())
            if source is not Source.MODEL and num:
                seen = tr(
                    "{name}: {num} tokens would be trained that the model did not write ({source})",
                    name=name,
                    num=num,
                    source=str(source),
                )
                raise broken("F110", step, seen, tr("The mask of the trained tokens is wrong."))
            start += count


def _check_episode(name: str, episode: Episode, step: int) -> None:
    numbers = [turn.number for turn in episode.turns]
    if len(set(numbers)) < len(numbers):
        seen = tr("{name}: its turns were sampled under the numbers {numbers}", name=name, numbers=numbers)
        raise broken("F144", step, seen, tr("Requests of different turns have the same id."))
    written, sampled = list(_written(episode)), [turn.digest for turn in episode.turns]
    if len(written) != len(sampled):
        seen = tr(
            "{name}: {num_sampled} turns were sampled, but {num_written} would be trained",
            name=name,
            num_sampled=len(sampled),
            num_written=len(written),
        )
        raise broken("F111", step, seen, tr("A turn was lost when the episode was put together."))
    differs = [n for n, (own, drawn) in enumerate(zip(written, sampled, strict=True)) if own != drawn]
    if differs:
        turn = differs[0] + 1
        seen = tr("{name}: turn {turn} has other tokens than were sampled", name=name, turn=turn)
        cause = tr("A turn was decoded and encoded again, or the template's end token was added to it.")
        raise broken("F110", step, seen, cause)
    left_out = sum(turn.num_left_out for turn in episode.turns)
    num_model = sum(count for s in episode.tokens for source, count in s.sources if source is Source.MODEL)
    if episode.num_trained != num_model - left_out:
        seen = tr(
            "{name}: {num_trained} of {num_model} sampled tokens would be trained, and {left_out} are left "
            "out",
            name=name,
            num_trained=episode.num_trained,
            num_model=num_model,
            left_out=left_out,
        )
        raise broken("F110", step, seen, tr("The mask of the trained tokens is wrong."))


def _written(episode: Episode) -> Iterator[int]:
    """Give the digest of the tokens of each turn of the model."""
    for sequence in episode.tokens:
        start = 0
        for source, count in sequence.sources:
            part = slice(start, start + count)
            if source is Source.MODEL:
                yield digest_of(sequence.token_ids[part])
            start += count


F143 = Code(
    code="F143",
    title="Episodes of a group began differently",
    why="GRPO compares the rewards of a group. If its episodes start from different states, the reward shows "
    "which start was easier, not which answer was better.",
)
F144 = Code(
    code="F144",
    title="Turns drawn with the same noise",
    why="Two turns drew their tokens with the same random numbers, so their samples are not independent. "
    "Each turn must have random numbers of its own.",
)

GUARD = Guard(
    place=4,
    of_rollout=lambda seen: check_turns(seen.groups, seen.rows, seen.facts),
    codes=(F143, F144),
)
