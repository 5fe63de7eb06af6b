"""What is remembered of rewards that fail: across a resume, and not across a stop."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from covey.errors import GuardStop
from covey.health.rewards import RewardWatch
from covey.types import (
    Draw,
    Finish,
    Group,
    NoiseKey,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Status,
    Trajectory,
)


def rollout(values: Sequence[float | None]) -> list[ScoredGroup]:
    """One group; None is a completion on which the reward failed."""
    prompt = Prompt(id=0, messages=None, text="", token_ids=(1,), columns={}, draw=Draw(epoch=0, rollout=0))
    parts = [
        ScorePart(name="paid", value=v, status=Status.ERROR if v is None else Status.OK, message="down")
        for v in values
    ]
    scores = tuple(Score(total=p.value, parts=(p,)) for p in parts)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=())
    made = tuple(
        Trajectory(
            segments=(),
            sampling=sampling,
            noise_key=NoiseKey(seed=0, split="train", rollout=0, attempt=0, prompt_id=0, sibling=sibling),
            finish=Finish.STOP,
            text="",
        )
        for sibling in range(len(parts))
    )
    return [ScoredGroup(group=Group(prompt=prompt, trajectories=made, planned=len(parts)), scores=scores)]


FINE, ONE_LOST, ALL_LOST = [0.0, 1.0] * 4, [None, 0.0, 1.0, 1.0], [None] * 8


def resumed(watch: RewardWatch) -> RewardWatch:
    other = RewardWatch()
    other.load_state(json.loads(json.dumps(watch.state())))
    return other


@pytest.mark.parametrize("is_resumed", [False, True])
def test_one_failure_in_four_is_too_many_after_ten_rollouts(is_resumed: bool) -> None:
    watch = RewardWatch()
    for step in range(9):
        watch.look(rollout(ONE_LOST), step)
        watch = resumed(watch) if is_resumed else watch
    with pytest.raises(GuardStop) as stop:
        watch.look(rollout(ONE_LOST), 9)
    assert "failed on 10 of 40 completions: down" in stop.value.finding.seen


def test_a_mended_reward_is_not_held_to_its_past() -> None:
    """The checkpoint of the stop is what the run goes on from."""
    watch = RewardWatch()
    for step in range(9):
        watch.look(rollout(FINE), step)
    with pytest.raises(GuardStop):
        watch.look(rollout(ALL_LOST), 9)
    watch = resumed(watch)
    for step in range(9, 30):
        assert watch.look(rollout(FINE), step) == []


def test_a_reward_that_never_differs_is_said_once() -> None:
    watch = RewardWatch()
    assert resumed(watch).look(rollout([0.5] * 8), 0)[0].code == "F108"
    watch.look(rollout(FINE), 0)
    assert resumed(watch).look(rollout([0.5] * 8), 1) == []
