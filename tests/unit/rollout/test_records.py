"""Episodes through JSON and back, exactly: what is replayed or exchanged trains as what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.batching.samples import to_samples
from covey.rollout.records import episode_of, groups_of, prompt_of, records_of, score_of, to_record
from covey.types import (
    Episode,
    EpisodeId,
    Group,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Source,
    Status,
)
from covey.types.arrays import floats
from support.groups import sequence

# Numbers whose decimal form is not their value: float32s, the smallest and a huge one among them.
FLOATS = tuple(torch.tensor([-0.1, -1e-7, -23.456789, -1 / 3, -1e-45, -3e38]).tolist())

PROMPT = Prompt(
    id=7,
    messages=None,
    text="<|im_start|>user\nWas ist 1+2? 你好 \u2028\n",
    token_ids=(256, 5, 9),
    columns={"solution": "3", "level": 2, "tags": ["a", "b"], "none": None},
    origin=Origin(epoch=1, rollout=12, attempt=2),
)
MODEL, OTHER = (Source.MODEL, (1, 2, 3, 4, 5, 6), 4), (Source.MODEL, (9,), 6)
TOOL = (Source.TOOL, (50, 51), 0)
SCORE = Score(
    total=0.1 + 0.2,
    parts=(
        ScorePart(name="accuracy", value=1 / 3),
        ScorePart(name="judge", value=None, status=Status.TIMEOUT, message="30 s"),
        ScorePart(name="other", value=None),
    ),
)


def episode(*turns: tuple[Source, tuple[int, ...], int], sibling: int = 1, **fields: Any) -> Episode:
    """An episode of one sequence, whose logprobs are those numbers."""
    own = sequence(PROMPT.token_ids, *turns)
    whole = replace(own, logprobs=floats(list(FLOATS) * 2)[: len(own.logprobs)])
    given = {
        "id": EpisodeId(seed=3, split="train", rollout=12, attempt=2, prompt_id=7, sibling=sibling),
        "sequences": (whole,),
        "outcome": Outcome.SCORED,
        "text": "é <answer>3</answer>\n",
        "sampling": SamplingParams(
            temperature=0.7, max_new_tokens=64, stop_token_ids=(257, 0), stop_strings=("</a>", "\n\n")
        ),
        "seconds": 0.1,
    }
    return Episode(**{**given, **fields})


def through_json(record):
    return json.loads(json.dumps(record))


def again(before: Episode) -> Episode:
    return episode_of(through_json(to_record(PROMPT, before, SCORE, group=0)))


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.INFRASTRUCTURE])
@pytest.mark.parametrize(
    "turns",
    [
        (MODEL,),
        (MODEL, TOOL, OTHER),
        (TOOL, MODEL),
        (MODEL, MODEL),
        (MODEL, (Source.ENVIRONMENT, (1, 2), 0)),
        (),
    ],
)
def test_an_episode_comes_back_equal(turns, outcome):
    before = episode(*turns, outcome=outcome)
    after = again(before)
    assert after == before
    (one,), (two,) = after.sequences, before.sequences
    assert one.logprobs.tobytes() == two.logprobs.tobytes() and one.token_ids.dtype == two.token_ids.dtype


def test_a_record_of_before_has_no_stop_strings():
    record = through_json(to_record(PROMPT, episode(MODEL), SCORE, group=0))
    del record["stop_strings"]
    sampling = replace(episode(MODEL).sampling, stop_strings=())
    assert episode_of(record) == episode(MODEL, sampling=sampling)


def test_several_sequences_come_back_each_with_its_own_prompt():
    before = episode(MODEL, TOOL)
    rewritten = sequence((256, 5, 9, 1, 2, 50), OTHER)
    before = replace(before, sequences=(*before.sequences, rewritten))
    after = again(before)
    assert after == before
    assert after.sequences[1].prompt_ids.tolist() == [256, 5, 9, 1, 2, 50]
    assert after.completion_ids == [1, 2, 3, 4, 5, 6, 50, 51, 9]


def test_an_infrastructure_failure_has_no_sequence():
    before = episode(outcome=Outcome.INFRASTRUCTURE, sequences=())
    assert again(before) == before


def test_a_completion_that_was_aborted_before_its_first_token_comes_back_equal():
    before = episode((Source.MODEL, (), 0), outcome=Outcome.ABORTED)
    assert again(before) == before


def test_logprobs_of_model_tokens_that_are_not_trained_are_left_out():
    # Turn one is kept out of the loss, turn two trains: the logprobs of two must not be those of one.
    record = through_json(to_record(PROMPT, episode((Source.MODEL, (1, 2), 1), TOOL, OTHER), SCORE, group=0))
    record["sources"][0] = ["model", 2, 0, 2]
    record["sampler_logprobs"] = [-0.5, -0.25, -2.0]
    (found,) = episode_of(record).sequences
    assert found.is_trained.tolist() == [False] * 7 + [True]
    assert (found.logprobs.tolist(), found.versions) == ([-2.0], ((6, 1),))


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
    after = score_of(through_json(to_record(PROMPT, episode(MODEL), score, group=0)))
    assert after == score
    assert repr(after) == repr(score)


def test_a_prompt_comes_back_but_for_its_messages():
    record = through_json(to_record(PROMPT, episode(MODEL), SCORE, group=0))
    assert prompt_of(record) == PROMPT
    spoken = replace(PROMPT, messages=({"role": "user", "content": "?"},))
    record = through_json(to_record(spoken, episode(MODEL), SCORE, group=0))
    assert prompt_of(record) == replace(spoken, messages=None)


def test_what_a_record_says_written_out():
    record = to_record(PROMPT, episode(MODEL, TOOL, OTHER), SCORE, group=5)
    assert record["completion_ids"] == [1, 2, 3, 4, 5, 6, 50, 51, 9]
    assert record["trained_mask"] == [1] * 6 + [0, 0, 1]
    assert record["sampler_logprobs"] == [*FLOATS, FLOATS[0]]
    assert record["versions"] == [4, 4, 4, 4, 4, 4, 6]
    assert record["sources"] == [["model", 6, 1, 6], ["tool", 2, 0, 0], ["model", 1, 1, 1]]
    assert (record["rollout"], record["group"], record["sibling"], record["prompt_id"]) == (12, 5, 1, 7)
    assert (record["reward"], record["status"], record["finish"]) == (0.1 + 0.2, "ok", "stop")


def test_groups_come_back_in_order_and_train_the_same():
    groups = [
        ScoredGroup(
            group=Group(
                prompt=replace(PROMPT, id=number, origin=PROMPT.origin),
                episodes=tuple(
                    episode(MODEL, TOOL, id=replace(episode(MODEL).id, prompt_id=number, sibling=s))
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
    group = Group(prompt=PROMPT, episodes=(episode(MODEL, sibling=0),), planned=1)
    groups = [ScoredGroup(group=group, scores=(SCORE,))] * 2
    assert groups_of(through_json(records_of(groups))) == groups
