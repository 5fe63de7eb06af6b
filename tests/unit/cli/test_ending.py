"""How long the ranks of a run have to end after a signal, and what their end means."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from covey.cli.ending import _ASLEEP_S, _AT_ONCE_S, _GRACE_S, _OTHERS_S, Ending, code_after_signal, killed
from covey.cli.ranks import exit_code, last_start
from covey.health.hang import Status, status_path, write_status
from covey.health.watchdog import Allowance

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ending(tmp_path: Path, clock: Clock) -> Ending:
    return Ending(tmp_path, clock=clock)


def write(directory: Path, rank: int, *, beat: int, seconds: float, allowed_s: float = 100.0) -> None:
    status = Status(
        rank=rank, world=2, pid=1, host="h", phase="update", step=1, micro=1, num_micro=2, seconds=seconds,
        allowed_s=allowed_s, collective="", num_collectives=0, frame="", memory={}, beat=beat,
    )  # fmt: skip
    write_status(status_path(directory, rank), status)


def is_overdue_after(
    ending: Ending, clock: Clock, seconds: float, *, has_one_ended: bool = False, every_s: float = 1.0
) -> bool:
    """Look once a second for so long; whether it was time to end the ranks before the last look, or then."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now += every_s
        if ending.is_overdue(has_one_ended=has_one_ended):
            return True
    return False


@pytest.mark.parametrize(
    ("received", "given"),
    [
        ([INT, INT, INT], [INT, INT, KILL]),
        ([TERM, INT, INT], [TERM, INT, KILL]),
        # A scheduler may send it again and again while a run saves.
        ([TERM, TERM, TERM, TERM], [TERM, TERM, TERM, TERM]),
        ([INT, TERM, INT], [INT, TERM, INT]),
    ],
)
def test_what_the_ranks_get_for_a_signal(ending: Ending, received: list[int], given: list[int]) -> None:
    assert [ending.receive(number) for number in received] == given
    assert ending.is_hurried == (INT in received[1:])


def test_a_step_and_a_save_take_what_they_take(ending: Ending, clock: Clock, tmp_path: Path) -> None:
    """An hour in which the ranks make progress; then they make none."""
    ending.receive(TERM)
    for beat in range(60):
        write(tmp_path, 0, beat=beat, seconds=1.0)
        # The other one waits in a collective, far beyond what its phase may take.
        write(tmp_path, 1, beat=beat, seconds=60.0 * beat)
        assert not is_overdue_after(ending, clock, 60, every_s=5)
    assert not is_overdue_after(ending, clock, 99 + _GRACE_S - 65)
    assert is_overdue_after(ending, clock, 75)
    assert "No rank had made progress" in ending.why


def test_who_says_nothing_has_the_time_of_a_first_phase(ending: Ending, clock: Clock) -> None:
    ending.receive(TERM)
    assert not is_overdue_after(ending, clock, Allowance().first_s + _GRACE_S - 5)
    assert is_overdue_after(ending, clock, 10)


def test_time_in_which_the_whole_run_was_stopped_does_not_count(
    ending: Ending, clock: Clock, tmp_path: Path
) -> None:
    ending.receive(TERM)
    write(tmp_path, 0, beat=1, seconds=1.0)
    assert not is_overdue_after(ending, clock, 5)
    clock.now += 10 * (100 + _GRACE_S) + _ASLEEP_S
    assert not ending.is_overdue(has_one_ended=False)


def test_a_second_interrupt_leaves_seconds(ending: Ending, clock: Clock, tmp_path: Path) -> None:
    write(tmp_path, 0, beat=1, seconds=1.0)
    ending.receive(TERM)
    ending.receive(INT)
    assert not is_overdue_after(ending, clock, _AT_ONCE_S)
    assert is_overdue_after(ending, clock, 2)


def test_all_ranks_end_together(ending: Ending, clock: Clock, tmp_path: Path) -> None:
    write(tmp_path, 0, beat=1, seconds=1.0)
    ending.receive(TERM)
    assert not is_overdue_after(ending, clock, 60)
    assert not is_overdue_after(ending, clock, _OTHERS_S, has_one_ended=True)
    assert is_overdue_after(ending, clock, 3, has_one_ended=True)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 143),
        ([143, -15], 143),
        ([130, 0], 143),
        ([0, -9], 137),
        ([-9, -9], 137),
        ([-11, 143], 139),
        ([1, -15], 1),
        ([], 143),
    ],
)
def test_what_a_launcher_ends_with_after_sigterm(codes: list[int], code: int) -> None:
    assert code_after_signal(TERM, codes) == code


@pytest.mark.parametrize(
    ("left", "returncode", "received", "code"),
    [
        # Saved, for a signal that this machine got, or another one.
        ("143", 143, [TERM], 143),
        ("130", 130, [INT], 130),
        ("143", 0, [], 143),
        # The ranks ended before there was anything to save.
        (None, 143, [TERM], 143),
        (None, -15, [TERM], 143),
        (None, 130, [INT], 130),
        # They were killed, or failed.
        (None, 137, [TERM], 1),
        (None, 137, [INT], 1),
        (None, 1, [TERM], 1),
        (None, -9, [TERM], 1),
        ("1", 143, [TERM], 1),
        ("3", 143, [TERM], 3),
        # Whoever presses Ctrl-C twice wants no save, however the ranks ended.
        (None, 137, [INT, INT], 130),
        ("1", 130, [INT, INT], 130),
        (None, 143, [TERM, INT], 130),
        ("143", 143, [TERM, INT], 143),
        (None, 143, [], 1),
        (None, 0, [], 0),
        (None, 7, [], 1),
    ],
)
def test_the_exit_code_says_whether_it_saved(
    tmp_path: Path, ending: Ending, left: str | None, returncode: int, received: list[int], code: int
) -> None:
    if left is not None:
        (tmp_path / "exit").write_text(left)
    for number in received:
        ending.receive(number)
    assert exit_code(str(tmp_path / "exit"), returncode, ending) == code


def test_the_last_start_counts(tmp_path: Path) -> None:
    path = str(tmp_path / "exit")
    assert last_start(path) == ""
    for name in ("ranks", "ranks.2", "ranks.10", "ranks.11.part"):
        (tmp_path / name).mkdir()
    assert last_start(path) == ".10"


@pytest.mark.parametrize(("received", "words"), [([], ""), ([TERM], "SIGTERM"), ([INT], "Ctrl-C")])
def test_killed_ranks_are_named(ending: Ending, received: list[int], words: str) -> None:
    for number in received:
        ending.receive(number)
    finding = killed([0, 1], ending)
    assert finding.code == "F133" and "ranks 0, 1" in finding.seen and words in finding.seen
    assert ("checkpoint" in finding.seen) == bool(received)
    ending.why = "No rank had made progress."
    assert (killed([0], ending).cause == ending.why) == bool(received)
