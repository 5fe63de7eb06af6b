"""`covey doctor --live`, asked of this very process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.activity import Activity
from covey.cli import live as module
from covey.cli.live import live
from covey.errors import ConfigError
from covey.health.hang import read_status, status_path
from covey.health.watchdog import LIVE, Watchdog, Watched

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="processes are found in /proc")


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def watchdogs(tmp_path: Path, activity: Activity) -> Iterator[list[Watchdog]]:
    """Two ranks in one process, of which the first is in the second micro-batch of step 8."""
    activity.step = 7
    activity.enter("update")
    activity.advance(2, 4)
    made = [
        Watchdog(
            Watched(
                activity=activity if rank == 0 else Activity(),
                output_dir=tmp_path,
                rank=rank,
                world=2,
                allowances={},
                report=lambda finding: None,
                leave=lambda leads, all_leave: None,
                poll_s=0.005,
            )
        )
        for rank in range(2)
    ]
    made[0].start()
    yield made
    for watchdog in made:
        watchdog.stop()


def wait_for_status(directory: Path, rank: int) -> None:
    while read_status(status_path(directory, rank)) is None:
        pass


def test_every_rank_answers(
    watchdogs: list[Watchdog], tmp_path: Path, activity: Activity, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdogs[1].start()
    wait_for_status(tmp_path, 0)
    moment = activity.moment
    assert live(str(os.getpid())) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"run {tmp_path}\n\nrank 0 of 2, process {os.getpid()} on ")
    assert "update, micro-batch 2 of 4, after step 7; " in out and "1800 s allowed" in out
    assert "rank 1 of 2" in out and ": start-up; " in out
    assert "test_every_rank_answers" in out and "thread watchdog" in out
    # Nothing is disturbed and nothing stays behind.
    assert activity.moment is moment
    assert not (tmp_path / LIVE).exists()


def test_a_rank_that_does_not_answer_is_named(
    watchdogs: list[Watchdog],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    watchdogs[1].poll()
    wait_for_status(tmp_path, 0)
    assert live(str(os.getpid())) == 1
    out = capsys.readouterr().out
    assert "frames, innermost first" in out
    assert "no answer; the line above is its status" in out.partition("rank 1 of 2")[2]


def test_a_run_is_found_by_the_process_that_launched_it(watchdogs: list[Watchdog], tmp_path: Path) -> None:
    wait_for_status(tmp_path, 0)
    assert module._run_of(os.getppid(), "1") == tmp_path


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"F303 --live: There is no process 4194305 on this machine"):
        live("4194305")
    with pytest.raises(ConfigError, match="There is no process run/x"):
        live("run/x")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(ConfigError, match=f"Process {child.pid} is not training"):
            live(str(child.pid))
    finally:
        child.communicate()
