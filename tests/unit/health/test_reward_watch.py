"""Rewards that fail: what is said once, what stops the run, and what a resume remembers of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from covey.errors import GuardStop
from covey.health.rewards import RewardWatch, refuse_no_numbers
from covey.types import Outcome, Score, ScoredGroup, ScorePart, Severity, Status
from support.groups import episode, scored

GOOD = ScorePart(name="judge", value=0.5)
ERROR = ScorePart(name="judge", value=None, status=Status.ERROR, message="ValueError: no")


def no_number(message: str) -> ScorePart:
    return ScorePart(name="judge", value=None, status=Status.INVALID, message=message)


def group(number: int, *parts: ScorePart) -> ScoredGroup:
    """A group of one completion for each part of the reward `judge`, beside a reward that is fine."""
    made = [episode(number=number, sibling=i, text=f"text {i}") for i in range(len(parts))]
    scores = [
        Score(total=part.value, parts=(ScorePart(name="other", value=float(i)), part), status=part.status)
        for i, part in enumerate(parts)
    ]
    return scored(made, scores, number=number)


def rollout(values: Sequence[float | None], size: int | None = None) -> list[ScoredGroup]:
    """Groups of `size` (None: one of all); None is a completion on which the reward failed."""
    parts = [ERROR if v is None else ScorePart(name="judge", value=v) for v in values]
    size = size or len(parts)
    return [group(n, *parts[n : n + size]) for n in range(0, len(parts), size)]


def collected(groups: Sequence[ScoredGroup], world: int) -> list[ScoredGroup]:
    """The groups, of whose completions each rank has collected an equal share; one rank alone owns none."""
    share = sum(len(g.scores) for g in groups) // world
    numbers = iter(range(share * world))
    return [
        replace(
            g,
            group=replace(
                g.group,
                episodes=tuple(
                    replace(e, owner=next(numbers) // share if world > 1 else None) for e in g.group.episodes
                ),
            ),
        )
        for g in groups
    ]


FINE, ONE_LOST, ALL_LOST = [0.0, 1.0] * 4, [None, 0.0, 1.0, 1.0], [None] * 8


def resumed(watch: RewardWatch) -> RewardWatch:
    other = RewardWatch()
    other.load_state(json.loads(json.dumps(watch.state())))
    return other


def test_a_call_that_raised_before_each_row_alone_had_a_value_is_said_once() -> None:
    """A reward that ranks the completions of a group ranks each alone then: values that it never meant."""
    watch = RewardWatch()
    alone = replace(GOOD, message="KeyError: 'gold'")
    (said,) = watch.check([group(0, GOOD, GOOD), group(1, alone, replace(alone, value=0.1))], 1)
    assert (said.code, said.severity) == ("F107", Severity.WARNING)
    assert said.seen == (
        "the reward judge raised when it was called with several completions, and then scored 2 of 4 "
        "completions one by one: KeyError: 'gold'"
    )
    assert resumed(watch).check([group(2, alone)], 2) == []
    (failed,) = watch.check([group(2, alone, alone), group(3, ERROR, alone)], 2)
    assert failed.seen == "the reward judge failed on 1 of 4 completions: ValueError: no"


def test_a_row_that_failed_is_no_call_of_several() -> None:
    alone = replace(GOOD, message="KeyError: 'gold'")
    watch = RewardWatch()
    (failed,) = watch.check([group(0, GOOD, GOOD), group(1, ERROR, replace(alone, value=0.1))], 1)
    assert "failed on 1 of 4" in failed.seen
    (said,) = watch.check([group(2, alone, alone)], 2)
    assert "scored 2 of 2 completions one by one" in said.seen


@pytest.mark.parametrize(
    ("world", "failed", "words"),
    [
        (1, (4, 5), "failed on 2 of 8 completions: ValueError: no"),
        (2, (4, 7), "failed on 2 of 8 completions, all of them of rank 1: ValueError: no"),
        (2, (3, 4), "failed on 2 of 8 completions: ValueError: no"),
        (4, (2, 3), "failed on 2 of 8 completions, all of them of rank 1: ValueError: no"),
    ],
)
def test_a_failure_is_said_once_with_its_rank(world: int, failed: tuple[int, ...], words: str) -> None:
    lost = [None if i in failed else v for i, v in enumerate(FINE)]
    watch = RewardWatch()
    assert watch.check(rollout(FINE, 4), 0) == []
    (found,) = watch.check(collected(rollout(lost, 4), world), 1)
    assert (found.code, found.step, found.severity) == ("F107", 1, Severity.WARNING)
    assert words in found.seen
    assert watch.check(rollout(lost, 4), 2) == []


def test_a_whole_rollout_or_ten_with_failures_end_the_run() -> None:
    with pytest.raises(GuardStop, match="F107"):
        RewardWatch().check(rollout(ALL_LOST), 0)
    watch = RewardWatch()
    for step in range(9):
        watch.check(rollout([0.0, None, *FINE[2:]], 4), step)
    with pytest.raises(GuardStop, match="10 of 80"):
        watch.check(rollout([0.0, None, *FINE[2:]], 4), 9)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_one_failure_in_four_is_too_many_after_ten_rollouts(is_resumed: bool) -> None:
    watch = RewardWatch()
    for step in range(9):
        watch.check(rollout(ONE_LOST), step)
        watch = resumed(watch) if is_resumed else watch
    with pytest.raises(GuardStop) as stop:
        watch.check(rollout(ONE_LOST), 9)
    assert "failed on 10 of 40 completions: ValueError: no" in stop.value.finding.seen


def test_a_mended_reward_is_not_held_to_its_past() -> None:
    """The checkpoint of the stop is what the run goes on from."""
    watch = RewardWatch()
    for step in range(9):
        watch.check(rollout(FINE), step)
    with pytest.raises(GuardStop):
        watch.check(rollout(ALL_LOST), 9)
    watch = resumed(watch)
    for step in range(9, 30):
        assert watch.check(rollout(FINE), step) == []


def test_a_reward_that_never_differs_is_said_once() -> None:
    watch = RewardWatch()
    assert resumed(watch).check(rollout([0.5] * 8), 0)[0].code == "F108"
    watch.check(rollout(FINE), 0)
    assert resumed(watch).check(rollout([0.5] * 8), 1) == []


def unscored(number: int, *values: float | None, name: str = "judge") -> ScoredGroup:
    """A group that one reward alone scores."""
    made = [episode(number=number, sibling=i) for i in range(len(values))]
    scores = [Score(total=v, parts=(ScorePart(name=name, value=v),)) for v in values]
    return scored(made, scores, number=number)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_whose_rewards_say_nothing_from_the_start_is_stopped(is_resumed: bool) -> None:
    watch = RewardWatch()
    (found,) = watch.check([unscored(0, None, None), unscored(1, None, None)], 0)
    assert found.code == "F108"
    watch = resumed(watch) if is_resumed else watch
    watch.check([unscored(2, None, None)], 1)
    with pytest.raises(GuardStop) as stop:
        watch.check([unscored(3, None, None)], 2)
    seen = "no reward has scored a completion so far: they returned None for all completions of 4 prompts"
    assert (stop.value.finding.code, stop.value.finding.seen) == ("F107", seen)


def test_rows_that_no_reward_applies_to_are_no_fault_beside_others() -> None:
    watch = RewardWatch()
    watch.check([unscored(0, None, None), unscored(1, None, 1.0)], 0)
    for step in range(1, 9):
        assert resumed(watch).check([unscored(step, None, None)], step) == []


def test_a_penalty_that_no_completion_gets_is_no_finding() -> None:
    for name in ("soft_overlong", "get_soft_overlong_punishment", "repetition"):
        assert RewardWatch().check([unscored(0, 0.0, 0.0, name=name)], 0) == []
        (found,) = RewardWatch().check([unscored(0, -1.0, -1.0, name=name)], 0)
        assert "same penalty" in found.cause
    (found,) = RewardWatch().check([unscored(0, 0.0, 0.0)], 0)
    assert "a penalty that no completion gets" in found.cause


@pytest.mark.parametrize("message", ["gave nan for this row", "gave inf for this row", "gave a str where"])
def test_one_value_that_is_no_number_stops_at_once(message: str) -> None:
    """One of 64 completions, in any rollout: the function and the row are named."""
    good = [group(n, *[GOOD] * 8) for n in range(7)]
    bad = group(41, *[GOOD] * 5, no_number(message), *[GOOD] * 2)
    watch = RewardWatch()
    watch.check([*good, group(40, *[GOOD] * 8)], 0)
    with pytest.raises(GuardStop) as stopped:
        watch.check([*good, bad], 3)
    finding = stopped.value.finding
    assert (finding.code, finding.step) == ("F107", 3)
    assert finding.seen == f"the reward judge {message}: row 42 of the data, completion 6 of 8, 'text 5'"
    assert finding.why and finding.cause and finding.fixes


def test_an_error_or_a_timeout_of_one_row_does_not() -> None:
    late = ScorePart(name="judge", value=None, status=Status.TIMEOUT, message="returned nothing within 60 s")
    silent = ScorePart(name="judge", value=None)
    groups = [group(0, GOOD, ERROR, late, silent, *[GOOD] * 4)]
    refuse_no_numbers(groups, 0)
    assert [found.severity for found in RewardWatch().check(groups, 0)] == [Severity.WARNING]


TASKS = {"math": ("accuracy",), "chat": ("judge",)}


def _of_tasks(*values: tuple[float | None, float | None], tasks: str = "math chat") -> list[ScoredGroup]:
    """A group of two for each task: the values of accuracy and of judge on both of its completions."""
    groups = []
    for task, pair in zip(tasks.split(), values, strict=True):
        parts = [
            tuple(ScorePart(name=n, value=v) for n, v in zip(("accuracy", "judge"), pair, strict=True))
            for pair in ((pair[0], pair[1]), (pair[0] and pair[0] + 1, pair[1] and pair[1] + 1))
        ]
        made = scored([episode()] * 2, [Score(total=1.0, parts=p) for p in parts])
        prompt = replace(made.group.prompt, task=task)
        groups.append(replace(made, group=replace(made.group, prompt=prompt)))
    return groups


def test_a_reward_that_was_not_asked_is_no_constant_one() -> None:
    there = _of_tasks((1.0, None), tasks="math")
    assert RewardWatch(TASKS).check(there, 0) == []
    # Without tasks a reward that never speaks is named.
    (found,) = RewardWatch().check(there, 0)
    assert found.code == "F108" and "judge is None for all 2" in found.seen


def test_a_constant_reward_is_seen_through_the_rows_of_other_tasks() -> None:
    flat = _of_tasks((0.0, None), (None, 1.0))
    (found,) = RewardWatch(TASKS).check(flat, 0)
    assert found.code == "F108" and "accuracy is 0 for all 2" in found.seen


def test_a_reward_that_fails_on_all_rows_of_its_task_ends_the_run() -> None:
    error = ScorePart(name="judge", value=None, status=Status.ERROR, message="no answer")
    groups = _of_tasks((1.0, None), (None, 1.0))
    scores = tuple(replace(s, parts=(s.parts[0], error)) for s in groups[1].scores)
    broken = [groups[0], replace(groups[1], scores=scores)]
    with pytest.raises(GuardStop, match="judge failed on 2 of 2"):
        RewardWatch(TASKS).check(broken, 0)


def test_the_rank_of_a_failure_is_told_though_other_rows_are_not_asked() -> None:
    error = ScorePart(name="judge", value=None, status=Status.ERROR, message="no answer")
    math, chat = _of_tasks((1.0, None), (None, 1.0))
    scores = (replace(chat.scores[0], parts=(chat.scores[0].parts[0], error)), chat.scores[1])
    (found,) = (
        f
        for f in RewardWatch(TASKS).check(collected([math, replace(chat, scores=scores)], 2), 0)
        if f.code == "F107"
    )
    assert "failed on 1 of 2 completions, all of them of rank 1" in found.seen


def test_a_completion_that_is_lost_was_not_scored() -> None:
    """Failures are counted among the completions that were scored, and so are values that never differ."""
    parts = [GOOD, GOOD, replace(GOOD, value=None), ERROR]
    (made,) = [group(0, *parts)]
    *others, failed = made.group.episodes
    others[2] = replace(others[2], outcome=Outcome.INFRASTRUCTURE, sequences=(), failure="gone")
    lost = replace(made, group=replace(made.group, episodes=(*others, failed)))
    (said,) = RewardWatch().check([lost], 1)
    assert "failed on 1 of 3 completions" in said.seen
    three = replace(lost, group=replace(lost.group, episodes=tuple(others)), scores=lost.scores[:3])
    (said,) = RewardWatch().check([three], 1)
    assert said.code == "F108" and "judge is 0.5 for all 2 completions" in said.seen
