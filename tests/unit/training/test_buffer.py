"""Rows of a rollout in a checkpoint: as they are written now, and as older versions wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.checkpoint.registry import State
from covey.checkpoint.shards import SavedShards, write_shards
from covey.errors import CheckpointError
from covey.training.buffer import RolloutBuffer, RolloutTokens
from covey.types import TrainSample
from covey.types.arrays import each, runs
from support.steps import GROUPS, SIBLINGS, plan_of, rows, stepped_rows

# What a row says of its tokens now; `versions` stood in its place.
SUMMARY = ("logprob_sum", "digest", "oldest_version", "newest_version")


def aged(given: Sequence[TrainSample]) -> list[TrainSample]:
    """The rows sampled by version 7, but for the first token of each second row, which is of version 6."""
    found = []
    for number, row in enumerate(given):
        sample, age = row.annotated.sample, number % 2
        versions = runs([7 - age] + [7] * (sample.num_trained - 1))
        older = replace(sample, tokens=replace(sample.tokens, versions=versions), age=age)
        found.append(replace(row, annotated=replace(row.annotated, sample=older)))
    return found


def buffer_of(rank: int, world: int) -> RolloutBuffer:
    """An empty one of a rank."""
    return RolloutBuffer(plan_of(rank=rank, world=world, completions_per_rank=GROUPS * SIBLINGS // world))


def written(given: Sequence[TrainSample], folder: Path, world: int, *without: str) -> list[dict[str, Any]]:
    """Write the tensors of all ranks but for some names; returns the rows as a state has them."""
    for rank in range(world):
        buffer = buffer_of(rank, world)
        buffer.fill(given, {}, {})
        shards = (shard for shard in RolloutTokens(buffer).shards() if shard.name not in without)
        write_shards(folder, shards, rank, world)
    found: list[dict[str, Any]] = json.loads(json.dumps(buffer.state().json))["rows"]
    return found


def read(saved: list[dict[str, Any]], tensors: SavedShards, rank: int, world: int) -> RolloutBuffer:
    """What a rank reads back."""
    buffer = buffer_of(rank, world)
    buffer.load_state(State(json={"done": 0, "rows": saved}))
    RolloutTokens(buffer).load_shards(tensors)
    return buffer


def same(ours: RolloutBuffer, theirs: RolloutBuffer) -> bool:
    """Whether both have the same rows, and the same tensors of their own; an older version has no digest of
    other ranks' rows."""
    states = [
        [
            {name: value for name, value in row.items() if name != "digest" or row["rank"] == of.plan.rank}
            for row in of.state().json["rows"]
        ]
        for of in (ours, theirs)
    ]
    shards = [{p.name: p for p in RolloutTokens(of).shards()} for of in (ours, theirs)]
    assert shards[0].keys() == shards[1].keys() >= {"token_ids", "versions", "old"}
    return states[0] == states[1] and all(
        own.first_row == other.first_row and torch.equal(own.tensor, other.tensor)
        for own, other in zip(shards[0].values(), shards[1].values(), strict=True)
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("of", [rows, stepped_rows])
def test_rows_with_the_versions_of_their_tokens(of: Any, world: int, tmp_path: Path) -> None:
    given = aged(of())
    today = written(given, tmp_path / "today", world)
    written(given, tmp_path / "older", world, "versions")
    older = [
        {
            **{name: value for name, value in row.items() if name not in SUMMARY},
            "versions": [list(run) for run in sample.annotated.sample.versions],
        }
        for row, sample in zip(today, given, strict=True)
    ]
    for rank in range(world):
        expected = read(today, SavedShards(tmp_path / "today"), rank, world)
        found = read(older, SavedShards(tmp_path / "older"), rank, world)
        assert same(found, expected)
        # The comparison is not blind.
        wrong = [{**row, "versions": [[5, row["num_trained"]]]} for row in older]
        assert not same(read(wrong, SavedShards(tmp_path / "older"), rank, world), expected)


def test_rows_with_all_that_there_is_of_their_tokens(tmp_path: Path) -> None:
    given = aged(rows())
    today = written(given, tmp_path, 1)
    older = []
    for row, trained in zip(today, given, strict=True):
        sample = trained.annotated.sample
        kept = ("group", "sibling", "prompt_length", "temperature", "finish", "advantage", "masked")
        older.append(
            {
                **{name: row[name] for name in (*kept, "needs_forward")},
                "token_ids": sample.token_ids.tolist(),
                "is_trained": sample.is_trained.tolist(),
                "sampler_logprobs": sample.sampler_logprobs.tolist(),
                "versions": list(each(sample.versions)),
                "loss_mask": trained.loss_mask.tolist(),
            }
        )
    tensors = SavedShards(tmp_path)
    buffer = buffer_of(0, 1)
    annotations = {name: tensors[name] for name in ("old", "ref", "entropy")}
    buffer.load_state(State(json={"done": 0, "rows": older}, tensors=annotations))
    assert same(buffer, read(today, tensors, 0, 1))


def test_tensors_that_are_not_those_of_the_rows(tmp_path: Path) -> None:
    saved = written(rows(), tmp_path, 1)
    saved[0]["num_trained"] -= 1
    with pytest.raises(CheckpointError, match="does not match its samples"):
        read(saved, SavedShards(tmp_path), 0, 1)
