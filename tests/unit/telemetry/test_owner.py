"""One process at a time owns a run directory, and what a dead one left is no obstacle."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.telemetry import owner
from covey.telemetry.owner import Changed, Lock, owner_of, take

HOLD = """
import sys, time
from pathlib import Path
from covey.telemetry.owner import Lock, take
until = float(sys.argv[2])
time.sleep(max(0.0, until - time.time()))
taken = take(Path(sys.argv[1]))
print("mine" if isinstance(taken, Lock) else f"of {taken.pid}", flush=True)
time.sleep(60)
"""


def start(directory: Path, at: float = 0.0) -> subprocess.Popen[str]:
    """A process that takes the directory at a moment, says whether it has it, and holds it."""
    words = [sys.executable, "-c", HOLD, str(directory), str(at)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def taken(directory: Path) -> Lock:
    lock = take(directory)
    assert isinstance(lock, Lock), lock
    return lock


def test_the_second_is_told_of_the_first_until_it_lets_go(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    second, seen = take(tmp_path), owner_of(tmp_path)
    assert not isinstance(second, Lock) and seen is not None
    for found in (second, seen):
        assert (found.pid, found.is_here) == (os.getpid(), True)
        assert found.host and found.since
    lock.release()
    assert owner_of(tmp_path) is None and list(tmp_path.iterdir()) == []
    taken(tmp_path).release()


def test_of_several_that_start_together_one_has_it(tmp_path: Path) -> None:
    at = time.time() + 3.0
    children = [start(tmp_path, at) for _ in range(4)]
    words = sorted(said(child) for child in children)
    for child in children:
        end(child)
    (pid,) = [child.pid for child in children if f"of {child.pid}" in words]
    assert words == ["mine", *[f"of {pid}"] * 3]


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    child = start(tmp_path)
    assert said(child) == "mine"
    end(child)
    assert (tmp_path / "run.lock").is_file() and owner_of(tmp_path) is None
    taken(tmp_path).release()


@pytest.mark.parametrize("content", ["", "rubbish", "[1]", "\x00" * 80, '{"pid": "x"}', "[" * 50_000])
def test_rubbish_is_no_owner(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(content)
    os.utime(tmp_path / "run.lock", (1, 1))
    assert owner_of(tmp_path) is None
    lock = taken(tmp_path)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize(("age", "is_alive"), [(5.0, True), (600.0, False)])
def test_a_machine_whose_locks_are_not_seen_is_judged_by_its_signs(
    age: float, is_alive: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"pid": 7, "host": "node9", "machine": "another", "since": "then"}))
    os.utime(path, (time.time() - age,) * 2)
    found = owner_of(tmp_path)
    assert (found is not None) == is_alive
    if found is not None:
        assert (found.host, found.pid, found.is_here) == ("node9", 7, False)
        assert found.sign_s == pytest.approx(age, abs=3.0)
    result = take(tmp_path)
    assert isinstance(result, Lock) != is_alive
    if isinstance(result, Lock):
        result.release()


def test_without_locks_of_files_a_number_that_is_used_again_is_not_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    lock = taken(tmp_path)
    found = owner_of(tmp_path)
    assert found is not None and found.pid == os.getpid()
    content = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps({**content, "started": content["started"] - 1}))
    assert owner_of(tmp_path) is None
    lock.release()


def test_signs_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_SIGN_EVERY_S", 0.05)
    lock = taken(tmp_path)
    os.utime(lock.path, (1, 1))
    until = time.monotonic() + 5
    while lock.path.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert lock.path.stat().st_mtime > 1
    lock.release()


def test_a_directory_that_is_no_longer_the_same_is_noticed(tmp_path: Path) -> None:
    for number, change in enumerate(("delete the file", "replace it", "replace the directory")):
        run = tmp_path / str(number)
        run.mkdir()
        lock = taken(run)
        lock.check()
        if change == "replace the directory":
            run.rename(tmp_path / "away")
            run.mkdir()
        else:
            lock.path.unlink()
        if change == "replace it":
            taken(run)
        with pytest.raises(Changed):
            lock.check()
        lock.release()
    assert owner_of(tmp_path / "1") is not None, "what another process has is not taken away"


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_what_is_no_file_is_an_error(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    other = tmp_path / "other"
    other.write_text("mine")
    if kind == "link":
        (run / "run.lock").symlink_to(other)
    else:
        (run / "run.lock").mkdir()
    with pytest.raises(OSError):
        take(run)
    assert other.read_text() == "mine" and owner_of(run) is None
