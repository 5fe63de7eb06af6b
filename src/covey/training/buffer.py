"""The rows of the rollout that is being trained on, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.checkpoint.registry import State
from covey.errors import CheckpointError
from covey.texts import tr
from covey.types import AnnotatedSample, Metric, Outcome, Sample, TrainSample
from covey.types.arrays import bools, runs

# Names of a checkpoint's tensors with a number for each trained token of a row that has them: annotations,
# and advantages where they differ within a row.
_ANNOTATIONS = {"old": "old_logprob_N", "ref": "ref_logprob_N", "entropy": "entropy_N"}
_ADVANTAGES = "token_advantages"
# Those with a number for each token of every row, and for each trained token.
_OF_TOKENS, _OF_TRAINED = ("token_ids", "is_trained"), ("sampler_logprobs",)


class RolloutBuffer:
    """The rows of a rollout until its steps are done, so that a resume in its middle goes on with the same
    ones."""

    name = "rollout"

    def __init__(self) -> None:
        self.rows: tuple[TrainSample, ...] = ()
        self.metrics: dict[str, Metric] = {}
        self.logged: dict[str, Metric] = {}
        self.done = 0

    def fill(
        self, rows: Sequence[TrainSample], metrics: dict[str, Metric], logged: dict[str, Metric]
    ) -> None:
        """Take a new rollout, none of whose steps is done; `logged` is what the rewards have logged."""
        self.rows, self.metrics, self.logged, self.done = tuple(rows), metrics, logged, 0

    def clear(self) -> None:
        """The rollout's steps are all done."""
        self.fill((), {}, {})

    def state(self) -> State:
        """What there is once a row as JSON, and what there is for each token as one flat tensor."""
        samples = [r.annotated.sample for r in self.rows]
        tensors = {n: _flat([getattr(s, n) for s in samples]) for n in (*_OF_TOKENS, *_OF_TRAINED) if samples}
        for kind, field in _ANNOTATIONS.items():
            present = [p for p in (getattr(r.annotated, field) for r in self.rows) if p is not None]
            if present:
                tensors[kind] = torch.cat(present)
        advantages = [r.token_advantages for r in self.rows if r.token_advantages is not None]
        if advantages:
            tensors[_ADVANTAGES] = _flat(advantages)
        return State(
            json={
                "done": self.done,
                "rows": [_row_json(r) for r in self.rows],
                "metrics": {name: [m.value, m.count] for name, m in self.metrics.items()},
                "logged": {name: [m.value, m.count] for name, m in self.logged.items()},
            },
            tensors=tensors,
        )

    def load_state(self, state: State) -> None:
        """Go on with these rows, `done` of whose steps are taken. Raises CheckpointError where tensors and
        rows do not match."""
        values: Any = state.json
        rows = _with_lengths(values["rows"])
        parts = _parts(rows, state.tensors)
        self.rows = tuple(_row(row, own) for row, own in zip(rows, parts, strict=True))
        self.metrics, self.logged = (
            {name: Metric(value=v, count=c) for name, (v, c) in values.get(kind, {}).items()}
            for kind in ("metrics", "logged")
        )
        self.done = values["done"]


def _flat(arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _row_json(row: TrainSample) -> dict[str, Any]:
    sample = row.annotated.sample
    return {
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


def _with_lengths(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they are written now; those of versions up to 0.9 held their tokens as JSON."""
    newest = max((v for row in rows if "token_ids" in row for v in row["versions"]), default=0)
    return [
        dict(row)
        if "token_ids" not in row
        else {
            **row,
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


def _parts(rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What each row has of every tensor."""
    lengths, trained = [row["length"] for row in rows], [row["num_trained"] for row in rows]
    some = [row["num_trained"] if row["has_token_advantages"] else 0 for row in rows]
    sizes = {
        **dict.fromkeys(_OF_TOKENS, lengths),
        **dict.fromkeys((*_OF_TRAINED, *_ANNOTATIONS), trained),
        _ADVANTAGES: some,
    }
    found: list[dict[str, Any]] = [{} for _ in rows]
    for name, own in sizes.items():
        whole = tensors.get(name)
        if whole is None:
            continue
        if whole.numel() != sum(own):
            raise CheckpointError(
                tr("the tensor {name} of the rollout does not match its samples", name=name)
            )
        for row, part in zip(found, whole.split(own), strict=True):
            row[name] = part
    return found


def _row(values: Mapping[str, Any], parts: Mapping[str, Any]) -> TrainSample:
    def of_tokens(name: str) -> Any:
        # A checkpoint of an older version holds it beside the other values of the row.
        return parts[name].numpy() if name in parts else values[name]

    sample = Sample(
        group=values["group"],
        sibling=values["sibling"],
        episode=values["episode"],
        sequence=values["sequence"],
        token_ids=of_tokens("token_ids"),
        prompt_length=values["prompt_length"],
        is_trained=of_tokens("is_trained"),
        sampler_logprobs=of_tokens("sampler_logprobs"),
        versions=tuple((version, count) for version, count in values["versions"]),
        temperature=values["temperature"],
        outcome=Outcome(values["finish"]),
        age=values["age"],
    )
    return TrainSample(
        annotated=AnnotatedSample(
            sample=sample, **{field: parts.get(kind) for kind, field in _ANNOTATIONS.items()}
        ),
        advantage=values["advantage"],
        loss_mask=bools([values["in_loss"]] * values["num_trained"]),
        masked=values["masked"],
        needs_forward=values["needs_forward"],
        token_advantages=of_tokens(_ADVANTAGES) if values["has_token_advantages"] else None,
    )
