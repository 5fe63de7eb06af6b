"""A reward that fails on a part of a rollout: said once, with the rank that it failed on."""

from __future__ import annotations

from collections.abc import Collection

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
    Severity,
    Status,
    Trajectory,
)

_PROMPT = Prompt(
    id=0, messages=None, text="", token_ids=(1,), columns={}, draw=Draw(epoch=0, rollout=0), opened=""
)
_TRAJECTORY = Trajectory(
    segments=(),
    sampling=SamplingParams(temperature=1.0, max_new_tokens=1, stop_token_ids=()),
    noise_key=NoiseKey(seed=0, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0),
    finish=Finish.STOP,
    text="",
)


def _rollout(failed: Collection[int]) -> list[ScoredGroup]:
    """Two groups of four; the completions of these numbers have no reward."""

    def score(i: int) -> Score:
        status = Status.ERROR if i in failed else Status.OK
        value = None if i in failed else float(i)
        part = ScorePart(name="judge", value=value, status=status, message="no answer" if i in failed else "")
        return Score(total=value, parts=(part,), status=status)

    group = Group(prompt=_PROMPT, trajectories=(_TRAJECTORY,) * 4, planned=4)
    return [ScoredGroup(group=group, scores=tuple(map(score, range(g, g + 4)))) for g in (0, 4)]


@pytest.mark.parametrize(
    ("world", "failed", "words"),
    [
        (1, (4, 5), "failed on 2 of 8 completions: no answer"),
        (2, (4, 7), "failed on 2 of 8 completions, all of them of rank 1: no answer"),
        (2, (3, 4), "failed on 2 of 8 completions: no answer"),
        (4, (2, 3), "failed on 2 of 8 completions, all of them of rank 1: no answer"),
    ],
)
def test_a_failure_is_said_once_with_its_rank(world: int, failed: tuple[int, ...], words: str) -> None:
    watch = RewardWatch(world)
    assert watch.look(_rollout(()), 0) == []
    (found,) = watch.look(_rollout(failed), 1)
    assert (found.code, found.step, found.severity) == ("F107", 1, Severity.WARNING)
    assert words in found.seen
    assert watch.look(_rollout(failed), 2) == []


def test_a_whole_rollout_or_ten_with_failures_end_the_run() -> None:
    with pytest.raises(GuardStop, match="F107"):
        RewardWatch().look(_rollout(range(8)), 0)
    watch = RewardWatch()
    for step in range(9):
        watch.look(_rollout((1,)), step)
    with pytest.raises(GuardStop, match="10 of 80"):
        watch.look(_rollout((1,)), 9)
