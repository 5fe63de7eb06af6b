"""Where a process is, and plans of ranks that are compared."""

from __future__ import annotations

import timeit

import pytest

from covey.activity import PHASES, Activity, moment_words
from covey.comm import LocalComm, check_plans
from covey.errors import GuardStop


def test_equal_plans_pass() -> None:
    check_plans([[PHASES.index("update"), 4, 6, 100]] * 3)


def test_plans_that_differ_are_told_apart() -> None:
    update, evaluate = PHASES.index("update"), PHASES.index("evaluate")
    with pytest.raises(GuardStop) as stopped:
        check_plans([[update, 4, 6, 1234], [update, 4, 5, 1234], [update, 4, 6, 1234], [evaluate, 3, 0, 0]])
    assert stopped.value.finding.code == "F302"
    assert stopped.value.finding.seen == (
        "ranks 0, 2: update after step 4 with 6 micro-batches and 1,234 trained tokens; "
        "rank 1: update after step 4 with 5 micro-batches and 1,234 trained tokens; "
        "rank 3: evaluate after step 3"
    )


def test_a_moment_in_words() -> None:
    assert moment_words("update", 12, 2, 4) == "update, micro-batch 2 of 4, after step 12"
    assert moment_words("save", 3) == "save, after step 3"
    # A run that resumes has taken steps, which say nothing of its start.
    assert moment_words("start", 40) == "start-up"


def test_one_process_enters_its_phases() -> None:
    comm = LocalComm()
    comm.begin("update", num_micro=3)
    assert comm.activity.moment.phase == "update"


def test_a_place_knows_its_phase_and_what_it_waits_in() -> None:
    seconds = iter(range(100))
    activity = Activity(lambda: float(next(seconds)))
    activity.enter("update")
    activity.advance(2, 3)
    activity.wait("sum")
    assert activity.moment == ("update", 1.0, 2.0, 2, 3, "sum")
    activity.leave_collective()
    assert activity.moment == ("update", 1.0, 3.0, 2, 3, "")
    assert activity.num_collectives == 1


def test_the_first_two_visits_are_not_learned_from() -> None:
    now = 0.0
    activity = Activity(lambda: now)
    for took in (90.0, 80.0, 7.0, 9.0, 8.0):
        activity.enter("update")
        now += took
    activity.enter("publish")
    assert activity.spans["update"] == (5, 9.0)


def test_saying_where_one_is_costs_next_to_nothing() -> None:
    activity = Activity()
    assert min(timeit.repeat(lambda: activity.enter("update"), number=1000, repeat=20)) / 1000 < 5e-6
    assert min(timeit.repeat(lambda: activity.advance(1, 2), number=1000, repeat=20)) / 1000 < 5e-6
