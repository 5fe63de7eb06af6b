"""The rows of the rollout that is being trained on, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.batching.shares import PackPlan, steps_of
from covey.checkpoint.registry import State
from covey.checkpoint.shards import SavedShards, Shard
from covey.comm import Comm, LocalComm
from covey.data.image_records import NO_ROWS, ImageRows, media_of, media_records
from covey.errors import CheckpointError
from covey.texts import tr
from covey.types import (
    AnnotatedSample,
    KeptSets,
    Metric,
    Outcome,
    Sample,
    SequenceSummary,
    TokenSequence,
    TrainSample,
)
from covey.types.arrays import constant_bools, each, runs
from covey.types.episode import held

# Flat tensors of the tokens of all rows, with a number for each trained token or, of two, for every one; and
# those of annotations, by the fields of an annotated sample.
_TOKENS = {
    "token_ids": np.int32,
    "is_trained": np.bool_,
    "sampler_logprobs": np.float32,
    "versions": np.int64,
    "token_advantages": np.float32,
    # Of rows with kept sets: their vocabulary, once a row, and their counts and words.
    "kept_vocab": np.int32,
    "kept_counts": np.int32,
    "kept_words": np.int32,
}
_OF_ALL_TOKENS = ("token_ids", "is_trained")
_ANNOTATIONS = {"old": "old_logprob_N", "ref": "ref_logprob_N", "entropy": "entropy_N"}
# What every rank knows of the tokens of a row.
_KNOWN = (
    *("prompt_length", "length", "num_trained", "logprob_sum", "digest", "prompt_digest"),
    *("oldest_version", "newest_version", "kept_words", "kept_checksum"),
)


class RolloutBuffer:
    """Holds the rows of a rollout until its steps are done, so that a resume in its middle goes on with the
    same rows. What a row has once is in one state; what it has for each token is written by the rank that
    forwards the row (`RolloutTokens`). Images of the data lie in the rows of `images`."""

    name = "rollout"

    def __init__(self, plan: PackPlan, comm: Comm | None = None, images: ImageRows = NO_ROWS) -> None:
        self.plan, self._comm, self._images = plan, comm or LocalComm(), images
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
        """Drop the rows of a rollout whose steps are all done."""
        self.fill((), {}, {})

    def ranks(self) -> list[int]:
        """Return the rank that forwards each row."""
        samples, forward = [r.annotated.sample for r in self.rows], [r.needs_forward for r in self.rows]
        steps = steps_of(samples, forward, self.plan) if samples else []
        return [int(rank) for step in steps for rank in step.assignment.rank_of_R]

    def state(self) -> State:
        """Return what each row has once, and what the rollout has once. Collective."""
        ranks = self.ranks()
        rows = [_row_json(r, rank) for r, rank in zip(self.rows, ranks, strict=True)]
        for number, media in self._media(ranks):
            rows[number]["media"] = media
        return State(
            json={
                "done": self.done,
                "rows": rows,
                "metrics": {name: [m.value, m.count] for name, m in self.metrics.items()},
                "logged": {name: [m.value, m.count] for name, m in self.logged.items()},
            }
        )

    def _media(self, ranks: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
        """Return the number of each row with images, and their records, of which the rank that forwards the
        row alone knows. Collective."""
        own = [
            (number, media_records(media))
            for number, (row, rank) in enumerate(zip(self.rows, ranks, strict=True))
            if rank == self.plan.rank and (media := row.annotated.sample.media)
        ]
        return chain.from_iterable(self._comm.gather_json(own))

    def load_state(self, state: State) -> None:
        """Go on with these rows, `done` of whose steps are taken; their tokens follow (`take_tokens`).
        CheckpointError where tensors and rows do not match."""
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
        """Complete the rows of `load_state` by what there is for each token of those that this rank
        forwards."""
        if any("logprob_sum" not in row for row in self.saved_rows):
            # Older versions wrote the versions of a row's tokens beside its other values, as runs.
            self.saved_rows, tensors = _with_versions(self.saved_rows, tensors)
        saved, places = self.saved_rows, _places(self.saved_rows, tensors)
        self.rows = tuple(_row(row, {}, is_own=False) for row in saved)
        own = self.plan.rank
        self.rows = tuple(
            _row(row, _read(place, tensors, is_own=rank == own), is_own=rank == own, images=self._images)
            for row, place, rank in zip(saved, places, self.ranks(), strict=True)
        )
        self.saved_rows = []


class RolloutTokens:
    """Saves what a buffer has for each token: every rank writes that of its own rows."""

    name = "rollout_tokens"

    def __init__(self, buffer: RolloutBuffer) -> None:
        self._buffer = buffer

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's part of the flat tensors, in which the rows of a rank stand together."""
        ranks, rank = self._buffer.ranks(), self._buffer.plan.rank
        for name in (*_TOKENS, *_ANNOTATIONS):
            sizes = [_size(name, row) for row in self._buffer.rows]
            own = [_values(name, row) for row, at in zip(self._buffer.rows, ranks, strict=True) if at == rank]
            present = [part for part in own if part is not None]
            if not present or not sum(sizes):
                continue
            first = sum(size for size, at in zip(sizes, ranks, strict=True) if at < rank)
            yield Shard(name, torch.cat(present), first, (sum(sizes),))

    def load_shards(self, saved: SavedShards) -> None:
        """Complete the rows that the buffer has read."""
        if self._buffer.saved_rows:
            self._buffer.take_tokens(saved)


def _values(name: str, row: TrainSample) -> Tensor | None:
    """Return the values of a row in a flat tensor."""
    if name in _ANNOTATIONS:
        value: Tensor | None = getattr(row.annotated, _ANNOTATIONS[name])
        return value
    if name == "versions":
        return torch.tensor(list(each(row.annotated.sample.versions)), dtype=torch.int64)
    if name.startswith("kept_"):
        kept = held(row.annotated.sample.tokens).kept
        value = None if kept is None else getattr(kept, name.removeprefix("kept_"))
        return None if value is None else torch.tensor(np.atleast_1d(value), dtype=torch.int32)
    array = row.token_advantages if name == "token_advantages" else getattr(row.annotated.sample, name)
    return None if array is None else torch.tensor(array)


def _size(name: str, row: TrainSample) -> int:
    sample = row.annotated.sample
    known = {
        "length": sample.length,
        "num_trained": sample.num_trained,
        "kept_words": sample.tokens.kept_words,
    }
    return _size_of(name, {**known, "has_token_advantages": row.token_advantages is not None})


def _size_of(name: str, row: Mapping[str, Any]) -> int:
    """Count the elements of a flat tensor that belong to a row."""
    if name in _OF_ALL_TOKENS:
        size: int = row["length"]
        return size
    # Older rows say nothing of kept sets.
    kept_words = row.get("kept_words", -1)
    if name.startswith("kept_"):
        sizes = {"kept_vocab": 1, "kept_counts": row["num_trained"], "kept_words": kept_words}
        return sizes[name] if kept_words >= 0 else 0
    return 0 if name == "token_advantages" and not row["has_token_advantages"] else row["num_trained"]


def _row_json(row: TrainSample, rank: int) -> dict[str, Any]:
    sample = row.annotated.sample
    return {
        "rank": rank,
        "group": sample.group,
        "sibling": sample.sibling,
        "episode": sample.episode,
        "sequence": sample.sequence,
        **{name: getattr(sample.summary, name) for name in _KNOWN},
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
    """Return rows that have their tokens as lists, as `_with_versions` takes them, and these tokens as flat
    tensors."""
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
    flat = {name: [x for row in rows for x in row.get(name, ())] for name in _TOKENS}
    return now, {name: torch.tensor(np.array(flat[name], dtype=dtype)) for name, dtype in _TOKENS.items()}


def _with_versions(
    rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return rows that have the versions of their tokens as runs, and their tensors, as both are written
    now."""
    order = _saved_order(rows)
    whole = {**tensors}
    whole["versions"] = torch.tensor([v for i in order for v in each(rows[i]["versions"])], dtype=torch.int64)
    now = [{**row, "digest": 0} for row in rows]
    for i, end in zip(order, accumulate(rows[i]["num_trained"] for i in order), strict=True):
        logprobs = whole["sampler_logprobs"][end - rows[i]["num_trained"] : end].numpy()
        own = [version for version, _ in rows[i]["versions"]]
        now[i]["logprob_sum"] = float(logprobs.sum(dtype="float64"))
        now[i]["oldest_version"], now[i]["newest_version"] = min(own, default=-1), max(own, default=-1)
    return now, whole


def _saved_order(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of rows in the order in which flat tensors hold them: rank by rank."""
    return sorted(range(len(rows)), key=lambda i: (rows[i]["rank"], i))


def _places(rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[dict[str, range]]:
    """Return where each row stands in each of the flat tensors.

    Raises CheckpointError where a tensor is longer or shorter than its rows together.
    """
    order = _saved_order(rows)
    found: list[dict[str, range]] = [{} for _ in rows]
    names = set(tensors)
    for name in (*_TOKENS, *_ANNOTATIONS):
        if name in _ANNOTATIONS and name not in names:
            continue
        sizes = [_size_of(name, rows[i]) for i in order]
        if sum(sizes) != (_length(name, tensors) if name in names else 0):
            raise CheckpointError(
                tr("the tensor {name} of the rollout does not match its samples", name=name)
            )
        for i, end, length in zip(order, accumulate(sizes), sizes, strict=True):
            found[i][name] = range(end - length, end)
    return found


def _length(name: str, tensors: Mapping[str, Tensor]) -> int:
    return tensors.shape(name)[0] if isinstance(tensors, SavedShards) else len(tensors[name])


def _read(place: Mapping[str, range], tensors: Mapping[str, Tensor], *, is_own: bool) -> dict[str, Tensor]:
    """Return the tensors of a row by name; of another rank's row its advantages alone, which every rank
    has."""
    found = {}
    for name, where in place.items():
        if not where:
            found[name] = torch.empty(0)
        elif is_own or name == "token_advantages":
            found[name] = (
                tensors.read(name, where.start, where.stop)
                if isinstance(tensors, SavedShards)
                else tensors[name][where.start : where.stop].clone()
            )
    return found


def _sets(parts: Mapping[str, Tensor]) -> KeptSets:
    """Return the kept sets of a row."""
    counts, words = (parts[name].numpy() for name in ("kept_counts", "kept_words"))
    return KeptSets(vocab=int(parts["kept_vocab"]), counts=counts, words=words)


def _row(
    values: Mapping[str, Any], parts: Mapping[str, Tensor], *, is_own: bool, images: ImageRows = NO_ROWS
) -> TrainSample:
    """Return a row of what is there once, and of the tensors of its tokens where it is this rank's own."""
    tokens: TokenSequence | SequenceSummary
    if is_own:
        tokens = TokenSequence.behind(
            values["prompt_length"],
            token_ids=parts["token_ids"].numpy(),
            is_trained=parts["is_trained"].numpy(),
            logprobs=parts["sampler_logprobs"].numpy(),
            versions=runs(parts["versions"].tolist()),
            kept=_sets(parts) if values.get("kept_words", -1) >= 0 else None,
            media=media_of(values.get("media", ()), images),
        )
    else:
        tokens = SequenceSummary(**{name: values[name] for name in _KNOWN if name in values})
    sample = Sample(
        group=values["group"],
        sibling=values["sibling"],
        episode=values["episode"],
        sequence=values["sequence"],
        tokens=tokens,
        temperature=values["temperature"],
        outcome=Outcome(values["finish"]),
        age=values["age"],
    )
    own = parts.get("token_advantages") if values["has_token_advantages"] else None
    return TrainSample(
        annotated=AnnotatedSample(
            sample=sample, **{field: parts.get(name) for name, field in _ANNOTATIONS.items()}
        ),
        advantage=values["advantage"],
        loss_mask=constant_bools(values["in_loss"], values["num_trained"]),
        masked=values["masked"],
        needs_forward=values["needs_forward"],
        token_advantages=None if own is None else own.numpy(),
    )
