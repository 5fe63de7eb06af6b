"""A reward that fails on a part of a rollout: said once, with the rank that it failed on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

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


TASKS = {"math": ("accuracy",), "chat": ("judge",)}


def _of_tasks(*values: tuple[float | None, float | None], tasks: str = "math chat") -> list[ScoredGroup]:
    """A group of two for each task: the values of accuracy and of judge on both of its completions."""
    groups = []
    for task, pair in zip(tasks.split(), values, strict=True):
        parts = [
            tuple(ScorePart(name=n, value=v) for n, v in zip(("accuracy", "judge"), pair, strict=True))
            for pair in ((pair[0], pair[1]), (pair[0] and pair[0] + 1, pair[1] and pair[1] + 1))
        ]
        group = Group(prompt=replace(_PROMPT, task=task), trajectories=(_TRAJECTORY,) * 2, planned=2)
        groups.append(ScoredGroup(group=group, scores=tuple(Score(total=1.0, parts=p) for p in parts)))
    return groups


def test_a_reward_that_was_not_asked_is_no_constant_one() -> None:
    there = _of_tasks((1.0, None), tasks="math")
    assert RewardWatch(1, TASKS).look(there, 0) == []
    # Without tasks a reward that never speaks is named.
    (found,) = RewardWatch().look(there, 0)
    assert found.code == "F108" and "judge is None for all 2" in found.seen


def test_a_constant_reward_is_seen_through_the_rows_of_other_tasks() -> None:
    flat = _of_tasks((0.0, None), (None, 1.0))
    (found,) = RewardWatch(1, TASKS).look(flat, 0)
    assert found.code == "F108" and "accuracy is 0 for all 2" in found.seen


def test_a_reward_that_fails_on_all_rows_of_its_task_ends_the_run() -> None:
    error = ScorePart(name="judge", value=None, status=Status.ERROR, message="no answer")
    groups = _of_tasks((1.0, None), (None, 1.0))
    scores = tuple(replace(s, parts=(s.parts[0], error)) for s in groups[1].scores)
    broken = [groups[0], replace(groups[1], scores=scores)]
    with pytest.raises(GuardStop, match="judge failed on 2 of 2"):
        RewardWatch(1, TASKS).look(broken, 0)


def test_the_rank_of_a_failure_is_told_though_other_rows_are_not_asked() -> None:
    error = ScorePart(name="judge", value=None, status=Status.ERROR, message="no answer")
    math, chat = _of_tasks((1.0, None), (None, 1.0))
    scores = (replace(chat.scores[0], parts=(chat.scores[0].parts[0], error)), chat.scores[1])
    (found,) = (
        f for f in RewardWatch(2, TASKS).look([math, replace(chat, scores=scores)], 0) if f.code == "F107"
    )
    assert "failed on 1 of 2 completions, all of them of rank 1" in found.seen
