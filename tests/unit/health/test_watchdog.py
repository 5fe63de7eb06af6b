"""The watchdog on a clock of the test's own: what it allows, when it holds still, and what it leaves."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.activity import Activity
from covey.health import watchdog as module
from covey.health.hang import Status, finding_of, next_hang, read_status, status_path, write_status
from covey.health.stacks import is_debugged, top_frame
from covey.health.watchdog import Allowance, Watchdog, Watched, allowances
from covey.types import Finding


class Clock:
    """Seconds that only the test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watch:
    """An activity, a watchdog that checks it when the test says so, and what it did."""

    def __init__(self, directory: Path, rank: int = 0, world: int = 1, **changes: Any) -> None:
        self.clock = Clock()
        self.activity = Activity(self.clock)
        self.found: list[Finding] = []
        self.left: list[tuple[bool, bool]] = []
        self.dog = Watchdog(
            Watched(
                activity=self.activity,
                output_dir=directory,
                rank=rank,
                world=world,
                allowances=allowances(60.0),
                report=self.found.append,
                leave=lambda leads, all_leave: self.left.append((leads, all_leave)),
                patience_s=changes.pop("patience_s", 0.0),
                sleep=lambda _: None,
                **changes,
            )
        )

    def stay(self, seconds: float) -> bool:
        """Let time pass and look as often as a thread would; True where the process was ended."""
        every = max(5.0, self.dog.watched.poll_s)
        until = self.clock.now + seconds
        while self.clock.now < until and not self.left:
            self.clock.now = min(until, self.clock.now + every)
            self.dog.poll()
        return bool(self.left)

    def visit(self, phase: str, *seconds: float) -> None:
        """Visits of a phase that took so long each."""
        for took in seconds:
            self.activity.enter(phase)
            self.clock.now += took
        self.activity.enter("publish")


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may itself be run under a debugger or a coverage tool."""
    monkeypatch.setattr(module, "is_debugged", lambda thread: False)


pytestmark = pytest.mark.usefixtures("untraced")


def test_a_phase_may_take_five_times_its_slowest_visit(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.visit("update", 900.0, 500.0, 20.0, 30.0, 25.0)
    watch.activity.enter("update")
    assert not watch.stay(149.0)
    assert watch.stay(5.0)


def test_the_first_visits_have_half_an_hour_and_no_phase_less_than_a_minute(tmp_path: Path) -> None:
    first = Watch(tmp_path, poll_s=100.0)
    first.activity.enter("rollout")
    assert not first.stay(1799.0)
    assert first.stay(5.0)
    later = Watch(tmp_path / "later")
    (tmp_path / "later").mkdir()
    later.visit("rollout", 0.1, 0.1, 0.1)
    later.activity.enter("rollout")
    assert not later.stay(59.0)
    assert later.stay(5.0)


def test_switched_off_it_only_says_how_the_run_is(tmp_path: Path) -> None:
    watch = Watch(tmp_path, poll_s=100.0, ends_hangs=False)
    watch.activity.enter("rollout")
    assert not watch.stay(10_000.0)
    status = read_status(status_path(tmp_path, 0))
    assert status is not None and status.seconds > 9_000.0
    assert not list(tmp_path.glob("hang-*"))


@pytest.mark.parametrize("phase", ["evaluate", "save"])
def test_what_comes_seldom_has_hours(phase: str, tmp_path: Path) -> None:
    watch = Watch(tmp_path, poll_s=300.0)
    watch.activity.enter(phase)
    assert not watch.stay(4 * 3600.0 - 1)
    watch.visit(phase, 1.0, 1.0, 1.0)
    watch.activity.enter(phase)
    assert not watch.stay(1799.0)
    assert watch.stay(5.0)


def test_a_reward_may_use_up_its_own_time_limit() -> None:
    assert allowances(600.0)["reward"].seconds(3, 1.0) > 2 * 600.0
    assert allowances(600.0).get("update", Allowance()).seconds(3, 1.0) == 60.0
    assert allowances(600.0, by_function=True)["rollout"].seconds(3, 1.0) == 30 * 60.0


def test_completions_and_micro_batches_are_progress(tmp_path: Path) -> None:
    """A rollout far slower than all before goes on as long as completions end."""
    watch = Watch(tmp_path)
    watch.visit("rollout", 1.0, 1.0, 1.0)
    watch.activity.enter("rollout")
    for _ in range(20):
        watch.activity.advance()
        assert not watch.stay(50.0)
    assert watch.stay(70.0)


def test_a_process_that_was_stopped_is_not_stuck(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.visit("update", 1.0, 1.0, 1.0)
    watch.activity.enter("update")
    assert not watch.stay(30.0)
    # Ctrl-Z, an hour later fg.
    watch.clock.now += 3600.0
    watch.dog.poll()
    assert not watch.left
    assert not watch.stay(20.0)
    assert watch.stay(20.0)


def test_a_debugger_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_debugged", is_debugged)
    watch = Watch(tmp_path, poll_s=1000.0)
    before = sys.gettrace()
    try:
        sys.settrace(lambda *_: None)
        sys._getframe().f_trace = lambda *_: None
        watch.activity.enter("update")
        assert not watch.stay(10_000.0)
    finally:
        sys.settrace(before)
        sys._getframe().f_trace = None
    if before is None:
        assert watch.stay(1000.0)


@pytest.fixture
def stood_still() -> Iterator[int]:
    """A thread inside a call of the system, with nothing of Python on top of `stand_still`."""
    reader, writer = os.pipe()

    def stand_still() -> None:
        os.read(reader, 1)

    thread = threading.Thread(target=stand_still, name="trainer")
    thread.start()
    assert thread.ident is not None
    while "stand_still" not in top_frame(thread.ident):
        pass
    yield thread.ident
    os.write(writer, b"x")
    thread.join()
    os.close(reader)
    os.close(writer)


def test_one_process_leaves_its_stacks_and_a_finding(tmp_path: Path, stood_still: int) -> None:
    (tmp_path / "hang-0001").mkdir()
    for number in (2, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoint-12").mkdir()
    watch = Watch(tmp_path, memory=lambda: {"allocated_gib": 3.5}, collectives=lambda: b"{}")
    watch.activity.thread = stood_still
    watch.activity.step = 12
    watch.visit("update", 1.0, 1.0, 1.0)
    watch.activity.enter("update")
    watch.activity.advance(2, 4)
    assert watch.stay(100.0)
    assert watch.left == [(True, True)]
    (finding,) = watch.found
    assert (finding.code, finding.step) == ("F301", 12)
    assert (
        "no progress for 65 s in update, micro-batch 2 of 4, after step 12, with 60 s allowed" in finding.seen
    )
    assert finding.seen.endswith("in stand_still")
    assert [f.edits for f in finding.fixes][1] == {"resume_from_checkpoint": str(tmp_path / "checkpoint-10")}
    status = json.loads((tmp_path / "hang-0002" / "rank-0.json").read_text())
    assert (status["phase"], status["micro"], status["memory"]) == ("update", 2, {"allocated_gib": 3.5})
    assert (tmp_path / "hang-0002" / "nccl-rank-0.json").read_bytes() == b"{}"
    text = (tmp_path / "hang-0002" / "rank-0.txt").read_text()
    assert "in stand_still" in text and "os.read(reader, 1)" in text
    assert "thread trainer (the one that trains)" in text and "allocated_gib 3.5" in text


def other(rank: int, **changes: Any) -> Status:
    status = Status(
        rank=rank,
        world=2,
        pid=1,
        host="h",
        phase="rollout",
        step=4,
        micro=0,
        num_micro=0,
        seconds=9.0,
        allowed_s=60.0,
        collective="",
        num_collectives=7,
        frame="judge.py:3 in ask",
        memory={},
        beat=1,
    )
    return replace(status, **changes)


def signs(directory: Path, rank: int, **changes: Any) -> Iterator[None]:
    """The status of another rank, with a new beat each time."""
    beat = 0
    while True:
        beat += 1
        write_status(status_path(directory, rank), other(rank, beat=beat, **changes))
        yield


@pytest.fixture
def waiting(tmp_path: Path) -> Callable[..., Watch]:
    def make(poll_s: float = 1.0) -> Watch:
        watch = Watch(tmp_path, rank=0, world=2, poll_s=poll_s)
        watch.visit("reward", 1.0, 1.0, 1.0)
        watch.activity.enter("reward")
        watch.activity.wait("gather_json")
        return watch

    return make


def test_a_rank_that_waits_leaves_the_judgement_to_one_that_works(
    waiting: Callable[..., Watch], tmp_path: Path
) -> None:
    watch, sign = waiting(), signs(tmp_path, 1)
    for _ in range(200):
        next(sign)
        assert not watch.stay(5.0)
    # The other one is stopped: nothing new is heard of it.
    assert not watch.stay(25.0)
    assert watch.stay(10.0)
    assert watch.left == [(True, False)]
    assert "Rank 1 did not answer" in watch.found[0].seen
    assert "stopped" in watch.found[0].cause


def test_ranks_that_all_wait_are_stuck(waiting: Callable[..., Watch], tmp_path: Path) -> None:
    watch, sign = waiting(), signs(tmp_path, 1, collective="begin")
    next(sign)
    assert not watch.stay(175.0)
    next(sign)
    assert watch.stay(10.0)


def test_a_rank_that_cannot_be_seen_has_the_time_of_a_first_visit(waiting: Callable[..., Watch]) -> None:
    watch = waiting(50.0)
    assert not watch.stay(1790.0)
    assert watch.stay(60.0)


def test_the_others_answer_when_one_is_stuck(tmp_path: Path) -> None:
    """The first rank is healthy, sees the directory of a hang, leaves its stacks in it and speaks for all."""
    watch = Watch(tmp_path, rank=0, world=2)
    watch.activity.enter("update")
    watch.activity.wait("gradients")
    watch.dog.poll()
    assert not watch.left
    hang = next_hang(tmp_path)
    hang.mkdir()
    write_status(hang / "rank-1.json", other(1, seconds=99.0))
    watch.dog.poll()
    assert watch.left == [(True, True)]
    assert (hang / "rank-0.txt").is_file()
    assert (
        "no progress for 99 s in rollout, after step 4, with 60 s allowed. "
        "Rank 1 is in rollout, after step 4, at judge.py:3 in ask. Rank 0 waits in gradients #1"
    ) in watch.found[0].seen
    assert "rank 1, which the others wait for: judge.py:3 in ask" in watch.found[0].cause
    assert json.loads((hang / "finding.json").read_text())["code"] == "F301"


def test_a_later_rank_stays_silent(tmp_path: Path) -> None:
    watch = Watch(tmp_path, rank=1, world=2)
    hang = next_hang(tmp_path)
    hang.mkdir()
    write_status(hang / "rank-0.json", other(0))
    watch.dog.poll()
    assert watch.left == [(False, True)] and watch.found == []
    assert read_status(hang / "rank-1.json") is not None


def test_ranks_in_different_collectives_are_told_apart(tmp_path: Path) -> None:
    both = [other(0, collective="sum"), other(1, collective="begin", phase="save")]
    found = finding_of(both, tmp_path / "hang-0001")
    assert "Rank 0 waits in sum #7 of rollout" in found.seen
    assert "Rank 1 waits in begin #7 of save" in found.seen
    assert "different places" in found.cause
    same = finding_of([other(r, collective="sum") for r in (0, 1)], tmp_path / "hang-0001")
    assert "Ranks 0, 1 wait in sum #7" in same.seen and "same collective" in same.cause
    assert all("resume_from_checkpoint" not in fix.edits for fix in same.fixes)


def test_the_thread_says_how_it_is_and_takes_that_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path, poll_s=0.001)
    watch.dog.start()
    written = threading.Event()
    for _ in range(5000):
        if status_path(tmp_path, 0).is_file():
            written.set()
            break
        written.wait(0.001)
    watch.dog.stop()
    assert written.is_set()
    assert list(tmp_path.iterdir()) == []
    assert watch.left == []


def test_a_disk_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "gone")
    watch.dog.poll()
    assert watch.left == []
