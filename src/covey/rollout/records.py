"""Episodes as JSON records, complete enough to train on again.

One form serves the rollout files, replay, and the groups that a checkpoint keeps for later rollouts.
Floats survive exactly: a float32 is a Python float, whose repr reads back to the same bits. The kept sets of
a sequence stand in its record as they are; each of the three writes them in a form of its own.
"""

from __future__ import annotations

import copy
import functools
import math
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from covey.data.image_records import NO_ROWS, ImageRows, media_of, media_records
from covey.data.pass_rates import checksum
from covey.types import (
    CallFailure,
    Episode,
    EpisodeId,
    Group,
    KeptSets,
    Medium,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Source,
    Status,
    StepSpans,
    TokenSequence,
    ToolCall,
    ToolResult,
    Turn,
)
from covey.types.arrays import bools, each, floats, ints, runs
from covey.types.turns import TurnCounts

Record = dict[str, Any]


def to_record(prompt: Prompt, episode: Episode, score: Score, *, group: int) -> Record:
    """One episode with its prompt and score; `group` is its group's number within the rollout. The tokens of
    its first sequence stand beside the prompt, and those of others in `sequences`."""
    key, sampling = episode.id, episode.sampling
    first, *others = [_sequence_record(s) for s in episode.tokens] or [_NO_TOKENS]
    return {
        "rollout": key.rollout,
        "group": group,
        "sibling": key.sibling,
        "prompt_id": prompt.id,
        "task": prompt.task,
        "checksum": checksum(prompt),
        "epoch": prompt.origin.epoch,
        "attempt": key.attempt,
        "split": key.split,
        "seed": key.seed,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop_strings": list(sampling.stop_strings),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **({"banned_token_ids": list(banned)} if (banned := sampling.banned_token_ids) else {}),
        "prompt": episode.prompt_text or prompt.text,
        **({"messages": list(own)} if (own := episode.prompt_messages) is not None else {}),
        "opened": prompt.opened,
        "text": episode.text,
        **({"turns": [_turn_record(turn) for turn in episode.turns]} if episode.turns else {}),
        **({} if (infos := episode.columns.get("rollout_infos")) is None else {"rollout_infos": infos}),
        "finish": str(episode.outcome),
        "reward": score.total,
        "parts": [_part_record(p) for p in score.parts],
        **({} if score.steps is None else {"steps": _spans_record(score.steps)}),
        "status": str(score.status),
        "message": score.message,
        "extras": dict(score.extras),
        "columns": dict(prompt.columns),
        **_non_finite_places(prompt.columns),
        "prompt_ids": list(prompt.token_ids),
        **({} if episode.sequences else _media_record(prompt.media)),
        **first,
        **({"sequences": others} if others else {}),
        "seconds": episode.seconds,
        **({"failure": episode.failure} if episode.failure else {}),
    }


def _turn_record(turn: Turn) -> Record:
    """A turn of the model: what it wrote, its calls, their results, and what followed."""
    return {
        "opened": turn.opened,
        "text": turn.text,
        "content": turn.content,
        "calls": [asdict(call) for call in turn.calls],
        "results": [asdict(result) for result in turn.results],
        "answer": [dict(message) for message in turn.answer],
        "reward": turn.reward,
        "seconds": turn.seconds,
        "number": turn.number,
        "digest": turn.digest,
        **({"num_left_out": turn.num_left_out} if turn.num_left_out else {}),
        **({"cut_ids": [*turn.cut_ids]} if turn.cut_ids else {}),
        **({"is_truncated": True} if turn.is_truncated else {}),
    }


def _turn_of(record: Mapping[str, Any]) -> Turn:
    # Images of results are among those of the sequences.
    results = [
        {**result, "failure": result["failure"] and CallFailure(result["failure"]), "images": ()}
        for result in record["results"]
    ]
    return Turn(
        **{
            name: record[name]
            for name in ("opened", "text", "content", "reward", "seconds", "number", "digest")
        },
        calls=tuple(ToolCall(**call) for call in record["calls"]),
        results=tuple(ToolResult(**result) for result in results),
        answer=tuple(record["answer"]),
        num_left_out=record.get("num_left_out", 0),
        cut_ids=tuple(record.get("cut_ids", ())),
        is_truncated=record.get("is_truncated", False),
    )


def conversation_text(record: Mapping[str, Any]) -> str:
    """Return what a record's episode says to people: its text, or of several turns each with what followed,
    each under the name of its role."""
    if not record.get("turns"):
        return str(record["text"])
    parts = []
    for turn in record["turns"]:
        parts.append(f"[assistant]\n{turn['opened']}{turn['text']}")
        parts += [f"[{answer['role']}]\n{answer.get('content') or ''}" for answer in turn["answer"]]
    return "\n".join(parts)


def _sequence_record(sequence: TokenSequence) -> Record:
    """The tokens of a sequence; one that is not an episode's first has its own prompt."""
    before = sequence.prompt_length
    is_trained = sequence.is_trained[before:]
    return {
        "prompt_ids": sequence.prompt_ids.tolist(),
        "completion_ids": sequence.completion_ids.tolist(),
        "trained_mask": is_trained.astype(int).tolist(),
        "sampler_logprobs": sequence.logprobs.tolist(),
        "versions": list(each(sequence.versions)),
        "sources": [list(run) for run in _source_runs(sequence)],
        **_media_record(sequence.media),
        **({} if sequence.kept is None else {"kept": sequence.kept}),
    }


def _media_record(media: Sequence[Medium]) -> Record:
    return {"media": media_records(media)} if media else {}


def with_sets_as_text(record: Record) -> Record:
    """Return a record whose kept sets are JSON too: the bytes of their int32 numbers in base64."""
    found = dict(record)
    if isinstance(kept := record.get("kept"), KeptSets):
        counts, words = (b64encode(part.astype("<i4").tobytes()) for part in (kept.counts, kept.words))
        found["kept"] = {"vocab": kept.vocab, "counts": counts.decode(), "words": words.decode()}
    if "sequences" in record:
        found["sequences"] = [with_sets_as_text(sequence) for sequence in record["sequences"]]
    return found


def _sets_of(record: Mapping[str, Any]) -> KeptSets | None:
    """The kept sets of a sequence's record, as they are or as text; None where it has none."""
    kept = record.get("kept")
    if kept is None or isinstance(kept, KeptSets):
        return kept
    counts, words = (np.frombuffer(b64decode(kept[name]), "<i4") for name in ("counts", "words"))
    return KeptSets(vocab=kept["vocab"], counts=counts, words=words)


def _source_runs(sequence: TokenSequence) -> Iterator[tuple[str, int, int, int]]:
    """Of each run of tokens behind the prompt that are trained alike: who wrote it, its tokens, whether it is
    trained, and how many logprobs it has."""
    start = 0
    for source, count in sequence.sources:
        masks = sequence.is_trained[start : start + count].tolist()
        start += count
        if source is Source.PROMPT:
            continue
        for is_trained, run in groupby(masks) if masks else [(False, ())]:
            num = sum(1 for _ in run)
            yield str(source), num, int(is_trained), num if is_trained else 0


_NO_TOKENS: Record = {
    "completion_ids": [],
    "trained_mask": [],
    "sampler_logprobs": [],
    "versions": [],
    "sources": [],
}


def _non_finite_places(columns: Mapping[str, Any]) -> Record:
    """Where columns hold NaN or infinities, which JSON has as words: `{"non_finite": [["scores", 0]]}`."""

    def places(value: Any, path: tuple[str | int, ...]) -> Iterator[list[str | int]]:
        if isinstance(value, float) and not math.isfinite(value):
            yield [*path]
        elif isinstance(value, Mapping | list | tuple):
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in inner:
                yield from places(item, (*path, key))

    where = list(places(columns, ()))
    return {"non_finite": where} if where else {}


def _columns_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a record, with the numbers that were written as words."""
    if "non_finite" not in record:
        return dict(record["columns"])
    columns = copy.deepcopy(record["columns"])
    for *path, last in record["non_finite"]:
        inner = functools.reduce(lambda value, key: value[key], path, columns)
        inner[last] = float(inner[last])
    return dict(columns)


def _part_record(part: ScorePart) -> Record:
    own = {"name": part.name, "value": part.value, "status": str(part.status), "message": part.message}
    return own if part.steps is None else {**own, "steps": list(part.steps)}


def _spans_record(steps: StepSpans) -> Record:
    """How many of the completion's tokens end each of its steps, and how the rewards count."""
    return {"ends": list(steps.ends), "weights": list(steps.weights), "outcome": steps.outcome}


def episode_of(record: Mapping[str, Any], rows: ImageRows = NO_ROWS) -> Episode:
    """The episode of a record; images of the data lie in `rows`."""
    outcome = Outcome(record["finish"])
    sequences = () if outcome is Outcome.INFRASTRUCTURE else (record, *record.get("sequences", ()))
    turns = tuple(map(_turn_of, record.get("turns", ())))
    return Episode(
        id=EpisodeId(
            seed=record["seed"],
            split=record["split"],
            rollout=record["rollout"],
            attempt=record["attempt"],
            prompt_id=record["prompt_id"],
            sibling=record["sibling"],
        ),
        sequences=tuple(_sequence_of(own, rows) for own in sequences),
        outcome=outcome,
        text=record["text"],
        sampling=SamplingParams(
            temperature=record["temperature"],
            max_new_tokens=record["max_new_tokens"],
            stop_token_ids=tuple(record["stop_token_ids"]),
            # Older records have none of these.
            stop_strings=tuple(record.get("stop_strings", ())),
            top_p=record.get("top_p", 1.0),
            top_k=record.get("top_k", 0),
            min_p=record.get("min_p", 0.0),
            banned_token_ids=tuple(record.get("banned_token_ids", ())),
        ),
        seconds=record["seconds"],
        failure=record.get("failure", ""),
        turns=turns,
        counts=TurnCounts.of(turns),
    )


def _sequence_of(record: Mapping[str, Any], rows: ImageRows) -> TokenSequence:
    """A sequence of a record, whose untrained turns of the model may have logprobs too; they are left out."""
    is_trained, logprobs, versions = [False] * len(record["prompt_ids"]), [], []
    start = 0
    for _, length, trained, spoken in record["sources"]:
        is_trained += [bool(trained)] * length
        if trained:
            logprobs += record["sampler_logprobs"][start : start + spoken]
            versions += record["versions"][start : start + spoken]
        start += spoken
    return TokenSequence(
        token_ids=ints([*record["prompt_ids"], *record["completion_ids"]]),
        is_trained=bools(is_trained),
        logprobs=floats(logprobs),
        versions=runs(versions),
        sources=(
            (Source.PROMPT, len(record["prompt_ids"])),
            *_joined_sources(record["sources"]),
        ),
        media=media_of(record.get("media", ()), rows),
        kept=_sets_of(record),
    )


def _joined_sources(found: Sequence[Sequence[Any]]) -> Iterator[tuple[Source, int]]:
    """Give the runs of who wrote tokens; parts of a turn that are trained and not trained are one run."""
    last: tuple[Source, int, int] | None = None
    for source, length, is_trained, _ in found:
        if last is not None and last[0] == source == Source.MODEL and last[2] != is_trained:
            last = last[0], last[1] + length, is_trained
            continue
        if last is not None:
            yield last[:2]
        last = Source(source), length, is_trained
    if last is not None:
        yield last[:2]


def score_of(record: Mapping[str, Any]) -> Score:
    """The score of a record."""
    parts = tuple(
        ScorePart(
            name=p["name"],
            value=p["value"],
            status=Status(p["status"]),
            message=p["message"],
            steps=None if "steps" not in p else tuple(p["steps"]),
        )
        for p in record["parts"]
    )
    spans = record.get("steps")
    return Score(
        total=record["reward"],
        parts=parts,
        status=Status(record["status"]),
        message=record["message"],
        extras=record.get("extras", {}),
        steps=None
        if spans is None
        else StepSpans(ends=tuple(spans["ends"]), weights=tuple(spans["weights"]), outcome=spans["outcome"]),
    )


def prompt_of(record: Mapping[str, Any], rows: ImageRows = NO_ROWS) -> Prompt:
    """The prompt of a record; its messages are not kept, only what they rendered to, and its images."""
    return Prompt(
        id=record["prompt_id"],
        messages=None,
        text=record["prompt"],
        token_ids=tuple(record["prompt_ids"]),
        columns=_columns_of(record),
        opened=record.get("opened", ""),
        task=record.get("task", ""),
        checksum=record.get("checksum", ""),
        media=_sequence_of(record, rows).prompt_media,
        origin=Origin(epoch=record["epoch"], rollout=record["rollout"], attempt=record["attempt"]),
    )


def groups_of(records: Sequence[Mapping[str, Any]], rows: ImageRows = NO_ROWS) -> list[ScoredGroup]:
    """Groups of a rollout from its records, in group and sibling order whatever order the records have; their
    images of the data lie in `rows`."""
    ordered = sorted(records, key=lambda r: (r["group"], r["sibling"]))
    groups = []
    for _, same in groupby(ordered, key=lambda r: r["group"]):
        members = list(same)
        episodes = tuple(episode_of(r, rows) for r in members)
        group = Group(prompt=prompt_of(members[0], rows), episodes=episodes, planned=len(members))
        groups.append(ScoredGroup(group=group, scores=tuple(score_of(r) for r in members)))
    return groups


def records_of(groups: Sequence[ScoredGroup], rank: int | None = None) -> list[Record]:
    """The records of a rollout, group by group; of one `rank` those of the episodes that it has collected,
    and of the first one also those that every rank has."""
    return [
        to_record(scored.group.prompt, episode, score, group=number)
        for number, scored in enumerate(groups)
        for episode, score in zip(scored.group.episodes, scored.scores, strict=True)
        if rank is None or (episode.owner or 0) == rank
    ]
