"""Makes the groups of a rollout from what each rank has collected.

Every rank gets all of them. Of its own episodes it has the tokens, the text and the whole scores; of the
others what the exchange tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.comm import Comm
from covey.data.text import TextCodec
from covey.rewards.registry import gives_steps, total
from covey.rollout.exchange import SUMMARY, StepRewards, Summaries, exchange
from covey.rollout.repetition import is_repetitive
from covey.rollout.slots import CollectPlan, Slot
from covey.texts import packed, unpacked
from covey.types import Episode, Group, Outcome, Score, ScoredGroup, ScorePart, Status
from covey.types.turns import TurnCounts

_COUNTS = tuple(TurnCounts.__dataclass_fields__)
# The most that a record counts.
_MOST = 2**16 - 1
_OUTCOMES, _STATUSES = tuple(Outcome), tuple(Status)
# What a rank is told of how another one's answer was read.
_PARSED_BY = ("none", "read")
# The text of a completion whose reward is no number is shown as far as this.
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Holds what one rank has collected: its slots, and one episode and one score for each."""

    slots: Sequence[Slot]
    episodes: Sequence[Episode]
    scores: Sequence[Score]


def assemble(
    slots: Sequence[Slot], own: RankShare, codec: TextCodec, plan: CollectPlan, comm: Comm
) -> list[ScoredGroup]:
    """Return the groups of a rollout with these slots, of which this rank has collected its `own`.
    Collective.

    Raises GuardStop (F122) on every rank where an episode is unknown, missing or there twice.
    """
    episodes = {s.number: e for s, e in zip(own.slots, own.episodes, strict=True)}
    scores = {s.number: score for s, score in zip(own.slots, own.scores, strict=True)}
    if comm.world > 1:
        every = exchange(summaries_of(own, codec, plan), len(slots), comm)
        first_row = np.searchsorted(every.rows["episode"], np.arange(len(slots) + 1)).tolist()
        for slot in slots:
            rows = range(first_row[slot.number], first_row[slot.number + 1])
            if slot.number in episodes:
                mine = episodes[slot.number]
                episodes[slot.number] = replace(mine, owner=int(every.rows["owner"][rows[0]]))
            else:
                episodes[slot.number] = _episode(slot, rows, every, plan)
                scores[slot.number] = _score(rows[0], every, plan)
    members: dict[int, list[Slot]] = {}
    for slot in slots:
        members.setdefault(slot.group, []).append(slot)
    return [
        ScoredGroup(
            group=Group(
                prompt=siblings[0].prompt,
                episodes=tuple(episodes[s.number] for s in siblings),
                planned=len(siblings),
            ),
            scores=tuple(scores[s.number] for s in siblings),
        )
        for siblings in members.values()
    ]


def summaries_of(own: RankShare, codec: TextCodec, plan: CollectPlan) -> Summaries:
    """Return what the other ranks are told of these episodes: one record a sequence, and one of an episode
    without any."""
    records: list[Any] = []
    parts: list[list[float]] = []
    statuses: list[list[int]] = []
    steps: dict[int, StepRewards] = {}
    words: dict[int, Any] = {}
    for slot, episode, score in zip(own.slots, own.episodes, own.scores, strict=True):
        assert len(score.parts) == len(plan.weights), "other ranks add up the parts, one a reward"
        number = len(records)
        if gives_steps(score.parts):
            steps[number] = _steps_of(score)
        if told := _words_of(episode, score):
            words[number] = told
        records += _records_of(slot, episode, score, codec, has_steps=number in steps, has_words=bool(told))
        num_rows = len(records) - number
        parts += [[math.nan if p.value is None else p.value for p in score.parts]] * num_rows
        statuses += [[_STATUSES.index(p.status) for p in score.parts]] * num_rows
    shape = len(records), len(plan.weights)
    return Summaries(
        rows=np.array(records, SUMMARY),
        parts_RK=np.array(parts, np.float64).reshape(shape),
        statuses_RK=np.array(statuses, np.int8).reshape(shape),
        steps=steps,
        words=words,
    )


def _records_of(
    slot: Slot, episode: Episode, score: Score, codec: TextCodec, *, has_steps: bool, has_words: bool
) -> list[Any]:
    """The records of an episode. What is said once stands in its first one."""
    record = np.zeros((), SUMMARY)
    record["episode"], record["outcome"] = slot.number, _OUTCOMES.index(episode.outcome)
    record["oldest_version"] = record["newest_version"] = record["kept_words"] = -1
    read = score.extras.get("parsed_by")
    record["parsed_by"] = -1 if read is None else int(read != _PARSED_BY[0])
    record["is_repetitive"] = is_repetitive(episode.trained_ids)
    for name in _COUNTS:
        record[name] = min(getattr(episode.counts, name), _MOST)
    records = [record.copy() for _ in episode.sequences or (None,)]
    records[0]["has_steps"], records[0]["has_words"] = has_steps, has_words
    for place, (found, sequence) in enumerate(zip(records, episode.tokens, strict=False)):
        found["row"] = place
        found["num_unknown"] = codec.num_unknown(sequence.trained_ids.tolist())
        for name in ("prompt_length", "length", "num_trained", "logprob_sum", "digest", "prompt_digest"):
            found[name] = getattr(sequence, name)
        found["oldest_version"], found["newest_version"] = sequence.oldest_version, sequence.newest_version
        found["kept_words"], found["kept_checksum"] = sequence.kept_words, sequence.kept_checksum
    return records


def _steps_of(score: Score) -> StepRewards:
    """The numbers of a score's steps; one that failed has no ends."""
    return StepRewards(
        ends=np.array(() if score.steps is None else score.steps.ends, np.int32),
        values=tuple(None if p.steps is None else np.array(p.steps, np.float64) for p in score.parts),
    )


def _words_of(episode: Episode, score: Score) -> dict[str, Any]:
    """Return the reasons, as JSON, why an episode or one of its rewards failed; empty where none did."""
    words: dict[str, Any] = {}
    if episode.failure:
        words["failure"] = packed(episode.failure)
    if any(p.message for p in score.parts):
        words["messages"] = [p.message for p in score.parts]
    if any(p.status is Status.INVALID for p in score.parts):
        words["text"] = episode.text[:_SHOWN]
    return words


def _episode(slot: Slot, rows: range, every: Summaries, plan: CollectPlan) -> Episode:
    """The episode of another rank."""
    first, words = every.rows[rows[0]], every.words.get(rows[0], {})
    return Episode(
        id=slot.episode_id,
        sequences=tuple(every.known(row) for row in rows if every.rows["length"][row]),
        outcome=_OUTCOMES[first["outcome"]],
        text=words.get("text", ""),
        sampling=plan.sampling,
        failure=unpacked(words.get("failure", "")),
        owner=int(first["owner"]),
        counts=TurnCounts(**{name: int(first[name]) for name in _COUNTS}),
    )


def _score(row: int, every: Summaries, plan: CollectPlan) -> Score:
    """The score of another rank's episode, whose first row this is."""
    record, steps = every.rows[row], every.steps.get(row)
    messages: Sequence[str] = every.words.get(row, {}).get("messages", [""] * len(plan.weights))
    values, statuses = every.parts_RK[row].tolist(), every.statuses_RK[row].tolist()
    extras: Mapping[str, Any] = (
        {} if record["parsed_by"] < 0 else {"parsed_by": _PARSED_BY[int(record["parsed_by"])]}
    )
    parts = [
        ScorePart(
            name=name,
            value=None if math.isnan(values[k]) else values[k],
            status=_STATUSES[statuses[k]],
            message=messages[k],
            steps=None if steps is None or (own := steps.values[k]) is None else tuple(own.tolist()),
        )
        for k, name in enumerate(plan.weights)
    ]
    ends = () if steps is None else tuple(steps.ends.tolist())
    return replace(total(parts, list(plan.weights.values()), ends), extras=extras)
