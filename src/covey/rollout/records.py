"""Trajectories as JSON records, complete enough to train on again.

One form serves the rollout files, replay, resume in the middle of a rollout, and the exchange between ranks.
Floats survive exactly: a float32 is a Python float, whose repr reads back to the same bits.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from covey.data.pass_rates import checksum
from covey.types import (
    Finish,
    Group,
    NoiseKey,
    Origin,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Segment,
    Source,
    Status,
    StepSpans,
    Trajectory,
)

Record = dict[str, Any]


def to_record(prompt: Prompt, trajectory: Trajectory, score: Score, *, group: int) -> Record:
    """One trajectory with its prompt and score; `group` is its group's number within the rollout."""
    key, sampling = trajectory.noise_key, trajectory.sampling
    completion = [s for s in trajectory.segments if s.source is not Source.PROMPT]
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
        "prompt": prompt.text,
        "opened": prompt.opened,
        "text": trajectory.text,
        "finish": str(trajectory.finish),
        "reward": score.total,
        "parts": [_part_record(p) for p in score.parts],
        **({} if score.steps is None else {"steps": _spans_record(score.steps)}),
        "status": str(score.status),
        "message": score.message,
        "extras": dict(score.extras),
        "columns": dict(prompt.columns),
        **_non_finite_places(prompt.columns),
        "prompt_ids": list(prompt.token_ids),
        "completion_ids": list(trajectory.completion_ids),
        "trained_mask": [int(s.trained) for s in completion for _ in s.token_ids],
        "sampler_logprobs": [x for s in completion for x in s.logprobs],
        "versions": [x for s in completion for x in s.versions],
        # Of each segment: who wrote it, its tokens, whether it is trained, how many logprobs it has.
        "sources": [[str(s.source), len(s.token_ids), int(s.trained), len(s.logprobs)] for s in completion],
        "seconds": trajectory.seconds,
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


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record."""
    return Trajectory(
        segments=(
            Segment(token_ids=tuple(record["prompt_ids"]), source=Source.PROMPT, trained=False),
            *_segments(record),
        ),
        sampling=SamplingParams(
            temperature=record["temperature"],
            max_new_tokens=record["max_new_tokens"],
            stop_token_ids=tuple(record["stop_token_ids"]),
        ),
        noise_key=NoiseKey(
            seed=record["seed"],
            split=record["split"],
            rollout=record["rollout"],
            attempt=record["attempt"],
            prompt_id=record["prompt_id"],
            sibling=record["sibling"],
        ),
        finish=Finish(record["finish"]),
        text=record["text"],
        seconds=record["seconds"],
    )


def _segments(record: Mapping[str, Any]) -> list[Segment]:
    segments, token, number = [], 0, 0
    for source, length, trained, spoken in record["sources"]:
        segments.append(
            Segment(
                token_ids=tuple(record["completion_ids"][token : token + length]),
                source=Source(source),
                trained=bool(trained),
                logprobs=tuple(record["sampler_logprobs"][number : number + spoken]),
                versions=tuple(record["versions"][number : number + spoken]),
            )
        )
        token += length
        number += spoken
    return segments


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


def prompt_of(record: Mapping[str, Any]) -> Prompt:
    """The prompt of a record; its messages are not kept, only what they rendered to."""
    return Prompt(
        id=record["prompt_id"],
        messages=None,
        text=record["prompt"],
        token_ids=tuple(record["prompt_ids"]),
        columns=_columns_of(record),
        opened=record.get("opened", ""),
        task=record.get("task", ""),
        checksum=record.get("checksum", ""),
        origin=Origin(epoch=record["epoch"], rollout=record["rollout"], attempt=record["attempt"]),
    )


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[ScoredGroup]:
    """Groups of a rollout from its records, in group and sibling order whatever order the records have."""
    ordered = sorted(records, key=lambda r: (r["group"], r["sibling"]))
    groups = []
    for _, same in groupby(ordered, key=lambda r: r["group"]):
        members = list(same)
        trajectories = tuple(trajectory_of(r) for r in members)
        group = Group(prompt=prompt_of(members[0]), trajectories=trajectories, planned=len(members))
        groups.append(ScoredGroup(group=group, scores=tuple(score_of(r) for r in members)))
    return groups


def records_of(groups: Sequence[ScoredGroup]) -> list[Record]:
    """The records of a rollout, group by group."""
    return [
        to_record(scored.group.prompt, trajectory, score, group=number)
        for number, scored in enumerate(groups)
        for trajectory, score in zip(scored.group.trajectories, scored.scores, strict=True)
    ]
