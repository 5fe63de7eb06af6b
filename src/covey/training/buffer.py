"""The rows of the rollout that is being trained on, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.batching.shares import PackPlan, steps_of
from covey.checkpoint.pieces import Piece, SavedPieces
from covey.checkpoint.registry import State
from covey.errors import CheckpointError
from covey.texts import tr
from covey.types import AnnotatedSample, Metric, Outcome, Sample, TrainSample
from covey.types.arrays import bools, runs

# Tensors with a number for each trained token that only the rank of the row has, by the fields of an
# annotated sample, and those that every rank has.
_ANNOTATIONS = {"old": "old_logprob_N", "ref": "ref_logprob_N", "entropy": "entropy_N"}
_TOKENS = ("token_ids", "is_trained", "sampler_logprobs", "token_advantages")


class RolloutBuffer:
    """The rows of a rollout until its steps are done, so that a resume in its middle goes on with the same
    ones. What there is once a row is one state; what there is for each token is written by the rank that
    forwards the row (`RolloutTokens`)."""

    name = "rollout"

    def __init__(self, plan: PackPlan) -> None:
        self.plan = plan
        self.rows: tuple[TrainSample, ...] = ()
        self.metrics: dict[str, Metric] = {}
        self.logged: dict[str, Metric] = {}
        self.done = 0
        self.saved_rows: list[dict[str, Any]] = []

    def fill(
        self, rows: Sequence[TrainSample], metrics: dict[str, Metric], logged: dict[str, Metric]
    ) -> None:
        """Take a new rollout, none of whose steps is done; `logged` is what the rewards have logged."""
        self.rows, self.metrics, self.logged, self.done = tuple(rows), metrics, logged, 0

    def clear(self) -> None:
        """The rollout's steps are all done."""
        self.fill((), {}, {})

    def ranks(self) -> list[int]:
        """The rank that forwards each row."""
        samples, forward = [r.annotated.sample for r in self.rows], [r.needs_forward for r in self.rows]
        steps = steps_of(samples, forward, self.plan) if samples else []
        return [int(rank) for step in steps for rank in step.assignment.rank_of_R]

    def state(self) -> State:
        """What there is once a row, and once a rollout."""
        return State(
            json={
                "done": self.done,
                "rows": [_row_json(r, rank) for r, rank in zip(self.rows, self.ranks(), strict=True)],
                "metrics": {name: [m.value, m.count] for name, m in self.metrics.items()},
                "logged": {name: [m.value, m.count] for name, m in self.logged.items()},
            }
        )

    def load_state(self, state: State) -> None:
        """Go on with these rows, `done` of whose steps are taken. CheckpointError where tensors and rows do
        not match."""
        values: Any = state.json
        self.metrics, self.logged = (
            {name: Metric(value=v, count=c) for name, (v, c) in values.get(kind, {}).items()}
            for kind in ("metrics", "logged")
        )
        self.done, self.saved_rows = values["done"], values["rows"]
        if any("token_ids" in row for row in self.saved_rows):
            # Older versions wrote the tokens of a row beside its other values, and all ranks' annotations.
            self.saved_rows, tokens = _older(self.saved_rows)
            self.take_tokens({**tokens, **state.tensors})

    def take_tokens(self, tensors: Mapping[str, Tensor]) -> None:
        """Complete the rows of `load_state` by what there is for each token. Annotations of rows that are
        another rank's by now are left out."""
        parts = _parts(self.saved_rows, tensors)
        self.rows = tuple(_row(row, own) for row, own in zip(self.saved_rows, parts, strict=True))
        self.rows = tuple(
            row if rank == self.plan.rank else _without_annotations(row)
            for row, rank in zip(self.rows, self.ranks(), strict=True)
        )
        self.saved_rows = []


class RolloutTokens:
    """What a buffer has for each token: every rank writes that of its own rows."""

    name = "rollout_tokens"

    def __init__(self, buffer: RolloutBuffer) -> None:
        self._buffer = buffer

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the flat tensors, in which the rows of a rank stand together."""
        ranks, rank = self._buffer.ranks(), self._buffer.plan.rank
        for name in (*_TOKENS, *_ANNOTATIONS):
            sizes = [_size(name, row) for row in self._buffer.rows]
            own = [_values(name, row) for row, at in zip(self._buffer.rows, ranks, strict=True) if at == rank]
            present = [part for part in own if part is not None]
            if not present or not sum(sizes):
                continue
            first = sum(size for size, at in zip(sizes, ranks, strict=True) if at < rank)
            yield Piece(name, torch.cat(present), first, (sum(sizes),))

    def load_pieces(self, saved: SavedPieces) -> None:
        """Complete the rows that the buffer has read."""
        if self._buffer.saved_rows:
            self._buffer.take_tokens(saved)


def _values(name: str, row: TrainSample) -> Tensor | None:
    """What a row has of a tensor."""
    if name in _ANNOTATIONS:
        value: Tensor | None = getattr(row.annotated, _ANNOTATIONS[name])
        return value
    array = row.token_advantages if name == "token_advantages" else getattr(row.annotated.sample, name)
    return None if array is None else torch.tensor(array)


def _size(name: str, row: TrainSample) -> int:
    if name in ("token_ids", "is_trained"):
        return len(row.annotated.sample.token_ids)
    return 0 if name == "token_advantages" and row.token_advantages is None else len(row.loss_mask)


def _row_json(row: TrainSample, rank: int) -> dict[str, Any]:
    sample = row.annotated.sample
    return {
        "rank": rank,
        "group": sample.group,
        "sibling": sample.sibling,
        "episode": sample.episode,
        "sequence": sample.sequence,
        "length": len(sample.token_ids),
        "num_trained": len(sample.sampler_logprobs),
        "prompt_length": sample.prompt_length,
        "versions": [list(run) for run in sample.versions],
        "temperature": sample.temperature,
        "finish": str(sample.outcome),
        "age": sample.age,
        "advantage": row.advantage,
        "in_loss": bool(row.loss_mask.all()),
        "masked": row.masked,
        "needs_forward": row.needs_forward,
        "has_token_advantages": row.token_advantages is not None,
    }


def _older(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Rows of an older version as they are written now, and their tokens as flat tensors."""
    newest = max((version for row in rows for version in row["versions"]), default=0)
    now = [
        {
            **row,
            "rank": 0,
            "episode": number,
            "sequence": 0,
            "length": len(row["token_ids"]),
            "num_trained": len(row["sampler_logprobs"]),
            "versions": runs(row["versions"]),
            "age": newest - min(row["versions"], default=newest),
            "in_loss": all(row["loss_mask"]),
            "has_token_advantages": "token_advantages" in row,
        }
        for number, row in enumerate(rows)
    ]
    dtypes = dict(zip(_TOKENS, (np.int32, np.bool_, np.float32, np.float32), strict=True))
    flat = {name: [x for row in rows for x in row.get(name, ())] for name in _TOKENS}
    return now, {name: torch.tensor(np.array(flat[name], dtype=dtypes[name])) for name in _TOKENS}


def _parts(rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Cut the flat tensors, which hold the rows rank by rank, and return the tensors of each row by name.

    Raises CheckpointError where a tensor is longer or shorter than its rows together.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["rank"], i))
    found: list[dict[str, Tensor]] = [{} for _ in rows]
    held = set(tensors)
    for name in (*_TOKENS, *_ANNOTATIONS):
        size = "length" if name in ("token_ids", "is_trained") else "num_trained"
        sizes = [rows[i][size] for i in order]
        if name == "token_advantages":
            sizes = [n if rows[i]["has_token_advantages"] else 0 for n, i in zip(sizes, order, strict=True)]
        if name in _ANNOTATIONS and name not in held:
            continue
        whole = tensors[name] if name in held else torch.empty(0)
        if whole.numel() != sum(sizes):
            raise CheckpointError(
                tr("the tensor {name} of the rollout does not match its samples", name=name)
            )
        ends = list(accumulate(sizes))
        for i, end, length in zip(order, ends, sizes, strict=True):
            found[i][name] = whole[end - length : end].clone()
    return found


def _row(values: Mapping[str, Any], parts: Mapping[str, Tensor]) -> TrainSample:
    sample = Sample(
        group=values["group"],
        sibling=values["sibling"],
        episode=values["episode"],
        sequence=values["sequence"],
        token_ids=parts["token_ids"].numpy(),
        prompt_length=values["prompt_length"],
        is_trained=parts["is_trained"].numpy(),
        sampler_logprobs=parts["sampler_logprobs"].numpy(),
        versions=tuple((version, count) for version, count in values["versions"]),
        temperature=values["temperature"],
        outcome=Outcome(values["finish"]),
        age=values["age"],
    )
    has_own = values["has_token_advantages"]
    return TrainSample(
        annotated=AnnotatedSample(
            sample=sample, **{field: parts.get(name) for name, field in _ANNOTATIONS.items()}
        ),
        advantage=values["advantage"],
        loss_mask=bools([values["in_loss"]] * values["num_trained"]),
        masked=values["masked"],
        needs_forward=values["needs_forward"],
        token_advantages=parts["token_advantages"].numpy() if has_own else None,
    )


def _without_annotations(row: TrainSample) -> TrainSample:
    return replace(row, annotated=AnnotatedSample(sample=row.annotated.sample))
