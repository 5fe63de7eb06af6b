"""What the processes of a run see of each other before they have a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey import exits
from covey.meeting import EXIT_FILE, RAISED, SPOKE, Meeting, meeting, started
from support.verbs import rank_variables

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Meeting]]:
    """A process that is rank 1, and the meeting as rank 0 sees it."""
    mine = Meeting(tmp_path / "ranks", 0, 2)
    mine.come()
    with subprocess.Popen(SLEEPS) as child:
        Meeting(mine.directory, 1, 2).put("process", f"{child.pid} {started(child.pid)}")
        yield child, mine
        child.kill()


def until(is_so: object) -> None:
    """Wait for what a signal brings about."""
    end = time.monotonic() + 5
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_process_does_is_seen(other: tuple[subprocess.Popen[bytes], Meeting]) -> None:
    child, mine = other
    assert mine.state(1) == "here"
    child.send_signal(signal.SIGSTOP)
    until(lambda: mine.state(1) == "stopped")
    child.send_signal(signal.SIGCONT)
    until(lambda: mine.state(1) == "here")
    # One that nobody has waited for yet is gone, too.
    child.send_signal(signal.SIGKILL)
    until(lambda: mine.state(1) == "gone")


def test_one_that_leaves_by_itself_is_not_gone(other: tuple[subprocess.Popen[bytes], Meeting]) -> None:
    child, mine = other
    Meeting(mine.directory, 1, 2).go()
    child.kill()
    child.wait()
    assert mine.state(1) == "away"
    mine.go()
    assert not mine.directory.exists(), "the last one removes the directory"


def test_a_directory_of_someone_else_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "ranks").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a directory that this user owns"):
        Meeting(tmp_path / "ranks", 0, 2).come()


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "2", "WORLD_SIZE": "2"}, False),
        ({"RANK": "x", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
    ],
    ids=str,
)
def test_who_meets(names: dict[str, str], is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", EXIT_FILE):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert (meeting() is not None) == is_one


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Meeting:
    """This process as rank 1 of a launched run, whose rank 0 is this process, too."""
    for name, value in rank_variables(1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit"))
    monkeypatch.setattr(exits, "_PATIENCE_S", 0.3)
    place = Meeting(tmp_path / "ranks", 0, 2)
    place.come()
    return place


def test_the_lowest_rank_that_raises_speaks(second: Meeting) -> None:
    threading.Timer(0.1, second.put, [RAISED]).start()
    assert not exits.speaks(is_of_all=False)


def test_a_rank_that_raises_alone_speaks_and_leaves_its_code(second: Meeting, tmp_path: Path) -> None:
    assert exits.speaks(is_of_all=False)
    assert Meeting(second.directory, 1, 2).has(1, SPOKE)
    assert exits.leave(2) == 2 and (tmp_path / "exit").read_text() == "2"


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_rank_that_spoke_leaves_its_code_when_the_first_has_ended(
    ends: str, second: Meeting, tmp_path: Path
) -> None:
    """Rank 0 ends without a word while rank 1, which no longer watches it, is about to speak or spoke."""
    Meeting(second.directory, 1, 2).come()
    Meeting(second.directory, 1, 2).go()
    if ends == "before":
        second.go()
    assert exits.speaks(is_of_all=False)
    if ends == "after":
        second.go()
    assert exits.leave(2) == 2 and (tmp_path / "exit").read_text() == "2"


def test_the_exit_code_that_a_rank_has_raised_with_stays(second: Meeting) -> None:
    """Other machines are told of it for as long as a rank of this one is there."""
    mine = Meeting(second.directory, 1, 2)
    mine.put(RAISED, "2")
    exits.speaks(is_of_all=False)
    assert mine.word(1, RAISED) == "2"


def test_what_all_raise_waits_for_the_first_as_long_as_it_lives(second: Meeting) -> None:
    """It saves a large model before it comes to it."""
    threading.Timer(0.8, second.put, [RAISED]).start()
    assert not exits.speaks(is_of_all=True)
    assert os.getpid() == (second.process(0) or (0, ""))[0]
