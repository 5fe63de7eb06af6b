"""`covey doctor --live PID`: where a running process is, and every rank of its run with it.

It writes a word into a file that the watchdog of each rank looks for, and those write their stacks: no signal
is sent and the training threads do not notice.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path

from covey.codes import CODES
from covey.errors import ConfigError
from covey.health.hang import Status, read_status, status_path
from covey.health.watchdog import LIVE
from covey.texts import tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import Fix, Problem

_PATIENCE_S = 10.0
_POLL_S = 0.05


def live(argv_pid: str) -> int:
    """Print where the run of a process is: a line and the stacks of all threads for each rank.

    PID is any process of the run, the launching one too. Returns 0, or 1 where a rank gave no answer. Raises
    ConfigError (F303) where no such run is found.
    """
    output_dir = _run_of(_own_process(argv_pid), argv_pid)
    first = next(_statuses(output_dir))
    say(spoken(tr("run {output_dir}", output_dir=output_dir)))
    directory = output_dir / LIVE
    directory.mkdir(exist_ok=True)
    word = secrets.token_hex(4)
    answers = {rank: directory / f"{word}-rank-{rank}.txt" for rank in range(first.world)}
    try:
        (directory / "ask").write_text(word, encoding="ascii")
        until = time.monotonic() + _PATIENCE_S
        while not all(isfile(a) for a in answers.values()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        for rank, answer in answers.items():
            text = (
                answer.read_text(encoding="utf-8") if isfile(answer) else spoken(_silence(output_dir, rank))
            )
            say(f"\n{text}".removesuffix("\n"))
        return 0 if all(isfile(a) for a in answers.values()) else 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _silence(output_dir: Path, rank: int) -> str:
    path = status_path(output_dir, rank)
    status = read_status(path)
    if status is None:
        return tr("rank {rank}: no answer, and no status was ever written\n", rank=rank)
    age = max(0.0, time.time() - path.stat().st_mtime)
    return tr(
        "{line}\n  no answer; the line above is its status {age:.0f} s ago. The process is stopped, its "
        "machine is gone, or native code blocks all of its threads.\n",
        line=status.line(),
        age=age,
    )


def _own_process(argv_pid: str) -> int:
    """The number of a process of this user."""
    path = Path("/proc") / argv_pid
    if not argv_pid.isdigit() or not isdir(path):
        raise _no_run(
            tr("There is no process {argv_pid} on this machine.", argv_pid=argv_pid),
            tr("The run has ended, or it runs on another machine."),
        )
    if path.stat().st_uid != os.getuid():
        raise _no_run(
            tr("Process {argv_pid} belongs to another user.", argv_pid=argv_pid),
            tr("Only the user who owns the process can look at it."),
        )
    return int(argv_pid)


def _run_of(pid: int, asked: str) -> Path:
    """The run directory that the process, or one that it has started, holds open."""
    for process in _family(pid):
        for directory in _open_directories(process):
            if any(status.pid == process for status in _statuses(directory)):
                return directory
    raise _no_run(
        tr("Process {asked} is not training, and neither is any process that it has started.", asked=asked),
        tr("It is another program, or a run that is still starting: the weights are being loaded."),
    )


def _family(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            # The name in brackets may hold anything; the parent is the second word behind it.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += sorted(children.get(pid, []))


def _open_directories(pid: int) -> Iterator[Path]:
    try:
        links = list((Path("/proc") / str(pid) / "fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            target = Path(os.readlink(link))
        except OSError:
            continue
        if isdir(target):
            yield target


def _statuses(directory: Path) -> Iterator[Status]:
    for path in sorted(directory.glob("status-rank-*.json")):
        if (status := read_status(path)) is not None:
            yield status


def _no_run(seen: str, cause: str) -> ConfigError:
    fix = Fix(text=tr("`pgrep -af covey` lists the processes; use any process of the run"))
    return ConfigError(
        [Problem(code="F303", option="--live", seen=seen, why=CODES["F303"].why, cause=cause, fixes=(fix,))]
    )
