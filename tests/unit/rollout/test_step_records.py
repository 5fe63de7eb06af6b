"""Rewards of steps in rollout files, between ranks and in a checkpoint: what comes back is what went in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from covey.rewards.registry import total
from covey.rollout.records import score_of, to_record
from covey.training.buffer import RolloutBuffer
from covey.training.source import ReplaySource
from covey.types import AnnotatedSample, Origin, Outcome, Prompt, Sample, ScorePart, TrainSample
from support.groups import episode

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


def test_a_checkpoint_in_the_middle_of_a_rollout_keeps_every_tokens_advantage():
    sample = Sample(
        group=0,
        sibling=0,
        episode=0,
        token_ids=(9, 1, 2),
        prompt_length=1,
        is_trained=(False, True, True),
        sampler_logprobs=(-0.1, -0.2),
        versions=((0, 2),),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )
    one = TrainSample(
        annotated=AnnotatedSample(sample=sample),
        advantage=0.15,
        loss_mask=(True, True),
        token_advantages=(0.1, 0.2),
    )
    buffer, again = RolloutBuffer(), RolloutBuffer()
    buffer.fill([one, replace(one, token_advantages=None)], {}, {})
    state = buffer.state()
    again.load_state(replace(state, json=json.loads(json.dumps(state.json))))
    assert [r.annotated.sample for r in again.rows] == [sample, sample]
    assert again.rows[0].advantages.tolist() == pytest.approx([0.1, 0.2])
    assert again.rows[1].advantages.tolist() == pytest.approx([0.15, 0.15])
    assert [r.advantage for r in again.rows] == [0.15, 0.15]
