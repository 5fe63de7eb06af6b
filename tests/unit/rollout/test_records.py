"""Trajectories through JSON and back, exactly: what is replayed or exchanged trains as what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from covey.batching.samples import to_samples
from covey.rollout.records import groups_of, prompt_of, records_of, score_of, to_record, trajectory_of
from covey.types import (
    Finish,
    Group,
    Origin,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Segment,
    Source,
    Status,
    Trajectory,
    TurnId,
)

# Numbers whose decimal form is not their value: float32s, a third, the smallest and a huge one.
FLOATS = (*torch.tensor([-0.1, -1e-7, -23.456789]).tolist(), -1 / 3, -5e-324, -1e300)

PROMPT = Prompt(
    id=7,
    messages=None,
    text="<|im_start|>user\nWas ist 1+2? 你好 \u2028\n",
    token_ids=(256, 5, 9),
    columns={"solution": "3", "level": 2, "tags": ["a", "b"], "none": None},
    origin=Origin(epoch=1, rollout=12, attempt=2),
)
MODEL = Segment(
    token_ids=(1, 2, 3, 4, 5, 6),
    source=Source.MODEL,
    trained=True,
    logprobs=FLOATS,
    versions=(4, 4, 4, 5, 5, 5),
)
TOOL = Segment(token_ids=(50, 51), source=Source.TOOL, trained=False)
SCORE = Score(
    total=0.1 + 0.2,
    parts=(
        ScorePart(name="accuracy", value=1 / 3),
        ScorePart(name="judge", value=None, status=Status.TIMEOUT, message="30 s"),
        ScorePart(name="other", value=None),
    ),
)


def trajectory(*completion: Segment, sibling: int = 1, finish: Finish = Finish.STOP) -> Trajectory:
    return Trajectory(
        segments=(Segment(token_ids=PROMPT.token_ids, source=Source.PROMPT, trained=False), *completion),
        sampling=SamplingParams(temperature=0.7, max_new_tokens=64, stop_token_ids=(257, 0)),
        turn=TurnId(seed=3, split="train", rollout=12, attempt=2, prompt_id=7, sibling=sibling),
        finish=finish,
        text="é <answer>3</answer>\n",
        seconds=0.1,
    )


def through_json(record):
    return json.loads(json.dumps(record))


@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize(
    "completion",
    [
        (MODEL,),
        (MODEL, TOOL, replace(MODEL, token_ids=(9,), logprobs=(-0.25,), versions=(6,))),
        (TOOL, MODEL),
        (MODEL, MODEL),
        (MODEL, Segment(token_ids=(1, 2), source=Source.ENVIRONMENT, trained=False)),
        (),
    ],
)
def test_a_trajectory_comes_back_equal(completion, finish):
    before = trajectory(*completion, finish=finish)
    after = trajectory_of(through_json(to_record(PROMPT, before, SCORE, group=0)))
    assert after == before
    # Equal floats may differ in type or sign of zero: compare the words too.
    assert repr(after) == repr(before)


def test_a_completion_that_was_aborted_before_its_first_token_comes_back_equal():
    before = trajectory(Segment(token_ids=(), source=Source.MODEL, trained=True), finish=Finish.ABORT)
    assert trajectory_of(through_json(to_record(PROMPT, before, SCORE, group=0))) == before


def test_model_tokens_that_are_not_trained_keep_their_logprobs():
    # Turn one is kept out of the loss, turn two trains: the logprobs of two must not be those of one.
    first = replace(MODEL, token_ids=(1, 2), logprobs=(-0.5, -0.25), versions=(1, 1), trained=False)
    second = replace(MODEL, token_ids=(3, 4), logprobs=(-2.0, -4.0), versions=(2, 2))
    before = trajectory(first, TOOL, second)
    after = trajectory_of(through_json(to_record(PROMPT, before, SCORE, group=0)))
    assert after.segments[-1] == second
    assert after == before


@pytest.mark.parametrize(
    "score",
    [
        SCORE,
        Score(total=None, parts=()),
        Score(total=0.0, parts=(ScorePart(name="a", value=0.0),)),
        Score(total=None, parts=SCORE.parts, status=Status.TIMEOUT, message="judge: 30 s"),
    ],
)
def test_a_score_comes_back_equal(score):
    after = score_of(through_json(to_record(PROMPT, trajectory(MODEL), score, group=0)))
    assert after == score
    assert repr(after) == repr(score)


def test_a_prompt_comes_back_but_for_its_messages():
    record = through_json(to_record(PROMPT, trajectory(MODEL), SCORE, group=0))
    assert prompt_of(record) == PROMPT
    spoken = replace(PROMPT, messages=({"role": "user", "content": "?"},))
    record = through_json(to_record(spoken, trajectory(MODEL), SCORE, group=0))
    assert prompt_of(record) == replace(spoken, messages=None)


def test_what_a_record_says_written_out():
    second = replace(MODEL, token_ids=(9,), logprobs=(-0.25,), versions=(6,))
    record = to_record(PROMPT, trajectory(MODEL, TOOL, second), SCORE, group=5)
    assert record["completion_ids"] == [1, 2, 3, 4, 5, 6, 50, 51, 9]
    assert record["trained_mask"] == [1] * 6 + [0, 0, 1]
    assert record["sampler_logprobs"] == [*FLOATS, -0.25]
    assert record["versions"] == [4, 4, 4, 5, 5, 5, 6]
    assert record["sources"] == [["model", 6, 1, 6], ["tool", 2, 0, 0], ["model", 1, 1, 1]]
    assert (record["rollout"], record["group"], record["sibling"], record["prompt_id"]) == (12, 5, 1, 7)
    assert (record["reward"], record["status"], record["finish"]) == (0.1 + 0.2, "ok", "stop")


def test_groups_come_back_in_order_and_train_the_same():
    groups = [
        ScoredGroup(
            group=Group(
                prompt=replace(PROMPT, id=number, origin=PROMPT.origin),
                trajectories=tuple(
                    replace(
                        trajectory(MODEL, TOOL, sibling=s),
                        turn=replace(trajectory(MODEL).noise_key, prompt_id=number, sibling=s),
                    )
                    for s in range(size)
                ),
                planned=size,
            ),
            scores=tuple(replace(SCORE, total=number + s / 3) for s in range(size)),
        )
        for number, size in enumerate((3, 1, 2))
    ]
    records = through_json(records_of(groups))
    assert groups_of(records) == groups
    assert groups_of(records[::-1]) == groups
    assert to_samples(groups_of(records)) == to_samples(groups)


def test_two_draws_of_one_prompt_stay_two_groups():
    # The same row drawn twice in a rollout: groups are told apart by their number, not by the prompt.
    group = Group(prompt=PROMPT, trajectories=(trajectory(MODEL, sibling=0),), planned=1)
    groups = [ScoredGroup(group=group, scores=(SCORE,))] * 2
    assert groups_of(through_json(records_of(groups))) == groups
