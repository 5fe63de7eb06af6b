"""Where a process is, and plans of ranks that are compared."""

from __future__ import annotations

import contextlib
import json
import timeit
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.activity import PHASES, Activity, moment_words
from covey.comm import LocalComm, check_plans, raise_on_all_ranks
from covey.errors import CheckpointError, GuardStop, OtherRankFailed, RunFailed
from covey.texts import has_value, tr
from covey.types import Finding, Fix
from support.processes import run_in_processes
from support.threads import on_ranks


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


def test_one_process_gives_itself_its_tensors() -> None:
    own = torch.arange(3, dtype=torch.uint8)
    assert LocalComm().gather_tensors(own)[0] is own
    assert LocalComm().swap_tensors([own])[0] is own


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_exchange_tensors_of_any_size(processes: int) -> None:
    run_in_processes(str(Path(__file__).with_name("comm_ranks.py")), processes=processes)


def test_a_place_knows_its_phase_and_what_it_waits_in() -> None:
    seconds = iter(range(100))
    activity = Activity(lambda: float(next(seconds)))
    activity.enter("update")
    activity.advance(2, 3)
    activity.wait("sum")
    assert activity.moment == ("update", 1.0, 2.0, 2, 3, "sum", "")
    activity.leave_collective()
    assert activity.moment == ("update", 1.0, 3.0, 2, 3, "", "")
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


class _First(LocalComm):
    """The first of two ranks, beside one that says this; through JSON as on a wire."""

    world = 2

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.other, self.own = other, None

    def gather_json(self, value: Any) -> list[Any]:
        self.own = json.loads(json.dumps(value))
        return [self.own, self.other]


def _of(error: Exception | None) -> Any:
    """What a rank says of what it failed with."""
    comm = _First()
    with contextlib.suppress(Exception):
        raise_on_all_ranks(comm, error)
    return comm.own


FINDING = Finding(code="F114", seen="s", why="w", cause="c", fixes=(Fix(text="t", edits={"a": 1}),), step=3)


def test_no_rank_raises_where_none_failed() -> None:
    raise_on_all_ranks(_First(), None)
    raise_on_all_ranks(LocalComm(), None)


def test_one_process_raises_its_own_error() -> None:
    error = KeyError("x")
    with pytest.raises(KeyError) as raised:
        raise_on_all_ranks(LocalComm(), error)
    assert raised.value is error


def test_every_rank_raises_the_same_finding() -> None:
    for own in (None, OSError("mine"), RunFailed(FINDING, 7)):
        with pytest.raises(GuardStop) as stop:
            raise_on_all_ranks(_First(_of(GuardStop(FINDING))), own)
        assert stop.value.finding == FINDING
    with pytest.raises(RunFailed) as failed:
        raise_on_all_ranks(_First(_of(RunFailed(FINDING, 7))), None)
    assert (failed.value.finding, failed.value.exit_code) == (FINDING, 7)


def test_what_another_rank_says_stays_a_text() -> None:
    """So it can be said in another language on every rank; an option may be called like a part of a text."""
    seen = tr("{option} is {value!r}.", option="beta", value=Decimal(3))
    told = replace(FINDING, seen=seen, fixes=(Fix(text=tr("leave it out"), edits={"template": None}),))
    with pytest.raises(GuardStop) as stop:
        raise_on_all_ranks(_First(_of(GuardStop(told))), None)
    found = stop.value.finding
    assert found == told and found.seen.template == seen.template  # type: ignore[attr-defined]
    assert found.fixes[0].text.template == "leave it out"  # type: ignore[attr-defined]
    with pytest.raises(OtherRankFailed) as failed:
        raise_on_all_ranks(_First(_of(CheckpointError(seen))), None)
    assert str(failed.value) == "rank 1 failed: CheckpointError: beta is Decimal('3')."
    assert has_value(str(failed.value), "beta")


def test_what_is_no_finding_is_raised_where_it_was() -> None:
    with pytest.raises(OtherRankFailed, match="rank 1 failed: OSError: the disk"):
        raise_on_all_ranks(_First(_of(OSError("the disk"))), None)
    with pytest.raises(OSError, match="mine"):
        raise_on_all_ranks(_First(_of(OSError("the disk"))), OSError("mine"))


def test_who_was_told_of_a_failure_is_not_named_for_it() -> None:
    """Ranks 4 and 5 are a part of the ranks, in which the second one failed first."""

    def in_a_part(comm: Any) -> None:
        comm.first_rank = 4
        raise_on_all_ranks(comm, ValueError("no room") if comm.rank else None)

    told, failed = on_ranks(2, in_a_part)
    assert isinstance(failed, ValueError) and isinstance(told, OtherRankFailed)
    assert "rank 5 failed" in str(told)
    found = on_ranks(3, lambda comm: raise_on_all_ranks(comm, (told, None, failed)[comm.rank]))
    assert found[0] is told and found[2] is failed
    assert isinstance(found[1], OtherRankFailed) and "rank 2 failed: ValueError: no room" in str(found[1])
