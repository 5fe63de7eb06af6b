"""Rewards of steps in rollout files, between ranks and in a checkpoint: what comes back is what went in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.checkpoint.registry import State
from covey.checkpoint.shards import SavedShards, write_shards
from covey.errors import CheckpointError
from covey.rewards.registry import total
from covey.rollout.records import score_of, to_record
from covey.training.buffer import RolloutBuffer, RolloutTokens
from covey.training.source import ReplaySource
from covey.types import (
    AnnotatedSample,
    KeptSets,
    Origin,
    Outcome,
    Prompt,
    Sample,
    ScorePart,
    TokenSequence,
    TrainSample,
)
from support.groups import episode
from support.steps import plan_of

PROMPT = Prompt(id=0, messages=None, text="Q", token_ids=(9,), columns={}, origin=Origin(epoch=0, rollout=0))
EPISODE = episode((9,), (1, 2, 3), text="a\n\nb")
PARTS = (
    ScorePart(name="prm", value=0.15, steps=(0.1, 0.2)),
    ScorePart(name="accuracy", value=1.0),
    ScorePart(name="other", value=None, steps=()),
)


def test_a_record_keeps_steps_and_where_they_end():
    score = total(PARTS, [0.5, 1.0, 2.0], (2, 3))
    record = json.loads(json.dumps(to_record(PROMPT, EPISODE, score, group=0)))
    assert score_of(record) == score
    assert record["parts"][0]["steps"] == [0.1, 0.2]
    assert record["steps"] == {"ends": [2, 3], "weights": [0.5, 1.0, 2.0], "outcome": 1.0}
    # A run without such rewards writes what it always has.
    plain = to_record(PROMPT, EPISODE, total(PARTS[1:2], [1.0]), group=0)
    assert "steps" not in plain and "steps" not in plain["parts"][0]


def test_a_replay_weighs_steps_anew(tmp_path):
    score = total(PARTS, [0.5, 1.0, 2.0], (2, 3))
    line = json.dumps(to_record(PROMPT, EPISODE, score, group=0))
    (tmp_path / "rollout-000000.jsonl").write_text(line + "\n")
    source = ReplaySource(tmp_path, {"prm": 3.0, "accuracy": 0.25, "other": 1.0})
    (again,) = source.next(0).groups[0].scores
    assert again == replace(total(PARTS, [3.0, 0.25, 1.0], (2, 3)), extras={})


def saved(buffers: Sequence[RolloutBuffer], directory: Path, into: RolloutBuffer) -> RolloutBuffer:
    """What the buffers of all ranks write, read by one."""
    for buffer in buffers:
        write_shards(directory, RolloutTokens(buffer).shards(), buffer.plan.rank, len(buffers))
    into.load_state(State(json=json.loads(json.dumps(buffers[0].state().json))))
    RolloutTokens(into).load_shards(SavedShards(directory))
    return into


SETS = ((), (0,), (1,), (0, 1))
KEPT = KeptSets.of([[1, 40], range(50)], 64), KeptSets.of([[3], [4]], 64)


def with_sets(rows: list[TrainSample], which: Sequence[int]) -> list[TrainSample]:
    """The rows, of which these have kept sets, a list and a bitmap, or two lists."""
    found = list(rows)
    for number in which:
        annotated = rows[number].annotated
        tokens = replace(annotated.sample.tokens, kept=KEPT[number])
        sample = replace(annotated.sample, tokens=tokens)
        found[number] = replace(rows[number], annotated=replace(annotated, sample=sample))
    return found


def rows_of_two(steps: tuple[float, ...] | None) -> list[TrainSample]:
    """Two episodes of two tokens, with old logprobs; only the first has advantages of its tokens."""
    sample = Sample(
        group=0,
        sibling=0,
        episode=0,
        tokens=TokenSequence.behind(
            1, token_ids=(9, 1, 2), is_trained=(False, True, True), logprobs=(-0.1, -0.2), versions=((0, 2),)
        ),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )
    other = replace(sample, sibling=1, episode=1, tokens=replace(sample.tokens, token_ids=(9, 3, 4)))
    first, second = (
        TrainSample(
            annotated=AnnotatedSample(sample=s, old_logprob_N=torch.tensor([-0.5, -0.25]) - s.episode),
            advantage=0.15,
            loss_mask=(True, True),
        )
        for s in (sample, other)
    )
    return [replace(first, token_advantages=steps), second]


@pytest.mark.parametrize("sets", SETS, ids=str)
def test_a_checkpoint_in_the_middle_of_a_rollout_keeps_every_tokens_advantage(sets, tmp_path):
    plan = replace(plan_of(), completions_per_rank=2)
    buffer = RolloutBuffer(plan)
    buffer.fill(with_sets(rows_of_two((0.1, 0.2)), sets), {}, {})
    again = saved([buffer], tmp_path, RolloutBuffer(plan))
    assert [i for i, r in enumerate(again.rows) if r.annotated.sample.tokens.kept is not None] == [*sets]
    assert [r.annotated.sample for r in again.rows] == [r.annotated.sample for r in buffer.rows]
    assert again.rows[0].advantages.tolist() == pytest.approx([0.1, 0.2])
    assert again.rows[1].advantages.tolist() == pytest.approx([0.15, 0.15])
    assert [r.advantage for r in again.rows] == [0.15, 0.15]
    assert [r.annotated.old_logprob_N.tolist() for r in again.rows] == [[-0.5, -0.25], [-1.5, -1.25]]


@pytest.mark.parametrize("sets", SETS, ids=str)
@pytest.mark.parametrize("reading", [1, 2])
def test_each_rank_writes_its_rows_and_any_number_of_ranks_reads_them(reading, sets, tmp_path):
    def plan(rank: int, world: int):
        return replace(plan_of(), rank=rank, world=world, completions_per_rank=2 // world)

    buffers = [RolloutBuffer(plan(rank, 2)) for rank in (0, 1)]
    for buffer in buffers:
        rows = with_sets(rows_of_two((0.1, 0.2)), sets)
        own = buffer.plan.rank
        # A rank has the tokens and the annotations of the row that it forwards.
        known = [r.annotated.sample.summary for r in rows]
        elsewhere = [replace(r.annotated.sample, tokens=k) for r, k in zip(rows, known, strict=True)]
        bare = [replace(r, annotated=AnnotatedSample(sample=s)) for r, s in zip(rows, elsewhere, strict=True)]
        buffer.fill([r if i == own else b for i, (r, b) in enumerate(zip(rows, bare, strict=True))], {}, {})
        assert buffer.ranks() == [0, 1]
    for rank in range(reading):
        again = saved(buffers, tmp_path, RolloutBuffer(plan(rank, reading)))
        tokens = {
            i: s.token_ids.tolist() for i, r in enumerate(again.rows) if (s := r.annotated.sample).is_held
        }
        assert tokens == {i: ids for i, ids in enumerate([[9, 1, 2], [9, 3, 4]]) if reading == 1 or i == rank}
        assert [r.annotated.sample.summary for r in again.rows] == known
        kept = {i: r.annotated.sample.tokens.kept for i, r in enumerate(again.rows) if i in tokens}
        assert kept == {i: KEPT[i] if i in sets else None for i in tokens}
        old = [r.annotated.old_logprob_N for r in again.rows]
        held = [None if o is None else o.tolist() for o in old]
        expected = [[-0.5, -0.25], [-1.5, -1.25]]
        assert held == [e if reading == 1 or i == rank else None for i, e in enumerate(expected)]
        assert again.rows[0].token_advantages.tolist() == pytest.approx([0.1, 0.2])


def test_a_buffer_of_an_older_version_is_read():
    row = {
        "group": 0,
        "sibling": 0,
        "token_ids": [9, 1, 2],
        "prompt_length": 1,
        "is_trained": [0, 1, 1],
        "sampler_logprobs": [-0.1, -0.2],
        "versions": [3, 3],
        "temperature": 1.0,
        "finish": "stop",
        "advantage": 0.5,
        "loss_mask": [1, 1],
        "masked": None,
        "needs_forward": True,
    }
    stale = {**row, "sibling": 1, "versions": [2, 2], "is_stale": True, "token_advantages": [0.25, 0.75]}
    again = RolloutBuffer(replace(plan_of(), completions_per_rank=2))
    again.load_state(State(json={"done": 1, "rows": [row, stale]}, tensors={"old": torch.arange(4.0)}))
    first, second = again.rows
    assert first.annotated.sample.token_ids.tolist() == [9, 1, 2] and again.done == 1
    assert [r.annotated.sample.age for r in again.rows] == [0, 1]
    assert [r.annotated.sample.episode for r in again.rows] == [0, 1]
    assert second.annotated.old_logprob_N.tolist() == [2.0, 3.0]
    assert second.advantages.tolist() == [0.25, 0.75] and first.token_advantages is None


def test_tokens_that_do_not_match_their_rows_are_refused(tmp_path):
    plan = replace(plan_of(), completions_per_rank=2)
    buffer, again = RolloutBuffer(plan), RolloutBuffer(plan)
    buffer.fill(rows_of_two(None), {}, {})
    again.load_state(buffer.state())
    tensors = {p.name: p.tensor for p in RolloutTokens(buffer).shards()}
    with pytest.raises(CheckpointError, match="old"):
        again.take_tokens({**tensors, "old": tensors["old"][:-1]})
    buffer.fill(with_sets(rows_of_two(None), (0, 1)), {}, {})
    again.load_state(buffer.state())
    tensors = {p.name: p.tensor for p in RolloutTokens(buffer).shards()}
    for name in ("kept_vocab", "kept_counts", "kept_words"):
        with pytest.raises(CheckpointError, match=name):
            again.take_tokens({**tensors, name: tensors[name][:-1]})
        with pytest.raises(CheckpointError, match=name):
            again.take_tokens({n: t for n, t in tensors.items() if n != name})
