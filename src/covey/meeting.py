"""Where the processes of a run on one machine leave each other small files: that one is there, that it has
raised an error, that it has failed. One of them also writes there what the other machines say.

A process comes as it starts, before it imports torch and joins any group, so one that is killed or stopped is
seen whatever the others wait in.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import dataclass
from os.path import exists, isdir
from pathlib import Path
from typing import Literal, NamedTuple

from covey.texts import tr

EXIT_FILE = "COVEY_EXIT_FILE"
"""The environment variable with the file that the first process of a machine writes its exit code to."""

RAISED, SPOKE = "raised", "spoke"
"""What a rank leaves that has raised an error (its exit code, where known), and one that has printed it."""

State = Literal["here", "stopped", "gone", "away"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The directory of those files, as one rank of `world` sees it."""

    directory: Path
    rank: int
    world: int

    @property
    def others(self) -> list[int]:
        """Every rank but this one."""
        return [rank for rank in range(self.world) if rank != self.rank]

    def come(self) -> None:
        """Let the others know of this process; OSError where another user has taken the directory's name."""
        if not isdir(self.directory.parent):
            return
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(
                tr(
                    "{directory} is not a directory that this user owns; remove it, or set TMPDIR",
                    directory=self.directory,
                )
            )
        for what in (RAISED, SPOKE):
            self._path(self.rank, what).unlink(missing_ok=True)
        self.put("process", f"{os.getpid()} {started(os.getpid())}")

    def go(self) -> None:
        """Let the others know that this process ends by itself; the last one removes the directory.

        That of launched ranks stays: a rank may still have to say that it spoke, and the launching process
        removes it.
        """
        with contextlib.suppress(OSError):
            self._path(self.rank, "process").unlink(missing_ok=True)
            if EXIT_FILE not in os.environ and not any(
                self.state(rank) in ("here", "stopped") for rank in self.others
            ):
                for path in self.directory.iterdir():
                    path.unlink()
                self.directory.rmdir()

    def put(self, what: str, words: str = "") -> None:
        """Leave a file of this rank."""
        with contextlib.suppress(OSError):
            part = self._path(self.rank, f"{what}.part")
            part.write_text(words, encoding="ascii")
            os.replace(part, self._path(self.rank, what))

    def put_for(self, rank: int, what: str, words: str) -> None:
        """Leave a file of a rank on another machine, which has told of it."""
        Meeting(self.directory, rank, self.world).put(what, words)

    def word(self, rank: int, what: str) -> str:
        """What a rank has left; empty where it has left nothing."""
        try:
            return self._path(rank, what).read_text(encoding="ascii")
        except OSError:
            return ""

    def read_signal(self) -> int:
        """The number of the signal that one of them got; 0 for none."""
        try:
            return int(self.signal.read_text(encoding="ascii") or 0)
        except (OSError, ValueError):
            return 0

    def has(self, rank: int, what: str) -> bool:
        """Whether a rank has left such a file."""
        return exists(self._path(rank, what))

    def process(self, rank: int) -> tuple[int, str] | None:
        """The number of a rank's process and when it started; None before it has come and after it has
        ended by itself."""
        with contextlib.suppress(OSError, ValueError):
            pid, start = self._path(rank, "process").read_text(encoding="ascii").split()
            return int(pid), start
        return None

    def state(self, rank: int) -> State:
        """What a rank's process is doing: `stopped` by SIGSTOP, `gone` without a word, `away` before it has
        come and after it has ended by itself."""
        known = self.process(rank)
        if known is None:
            return "away"
        pid, start = known
        if str(started(pid)) != start:
            # It may have ended by itself in between.
            return "gone" if self.process(rank) == known else "away"
        return "stopped" if is_stopped(pid) else "here"

    def fail_first(self) -> bool:
        """Whether this is the first process to fail."""
        try:
            os.close(os.open(self.failure, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            # A full disk; whoever started the processes sees that this one ends.
            return True
        return True

    @property
    def failure(self) -> Path:
        """The mark of the first process that failed."""
        return self.directory / "failed"

    @property
    def signal(self) -> Path:
        """The number of the signal that one of them got."""
        return self.directory / "signal"

    def _path(self, rank: int, what: str) -> Path:
        return self.directory / f"rank-{rank}-{what}"


def meeting() -> Meeting | None:
    """Where this process meets the other ranks of its run; None where it is alone."""
    rank, world = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isascii() and rank.isdigit() and world.isascii() and world.isdigit()):
        return None
    if not int(rank) < int(world) or int(world) == 1:
        return None
    return Meeting(_directory(), int(rank), int(world))


class EarlierRun(NamedTuple):
    """The run of the processes that torchrun had started before these: its directory, and what ended it."""

    output_dir: str
    failed: str


def remember_run(output_dir: Path, failed: str = "") -> None:
    """Leave the name of this run for processes that torchrun starts in the place of these."""
    if is_last_start():
        return
    path = _run_file()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump([str(output_dir), failed], file)
        os.replace(part, path)


def earlier_run() -> EarlierRun | None:
    """The run that these processes go on with; None where torchrun has started them for the first time."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        descriptor = os.open(_run_file(), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            if os.fstat(descriptor).st_uid == os.getuid():
                return EarlierRun(*map(str, json.load(file)))
    return None


def forget_run() -> None:
    """Remove that name: processes that are started after these begin a run of their own."""
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        with contextlib.suppress(OSError):
            _run_file().unlink(missing_ok=True)


def is_last_start() -> bool:
    """Whether torchrun starts no process again after these."""
    count, most = (os.environ.get(f"TORCHELASTIC_{n}", "") for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    return not (count.isdigit() and most.isdigit() and int(count) < int(most))


def exit_file() -> str | None:
    """The file for the exit code of this machine's processes, of each start its own; None where the process
    that launched them does not ask for it."""
    path = os.environ.get(EXIT_FILE)
    return None if path is None else f"{path}{_start_suffix()}"


def _start_suffix() -> str:
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "" if count == "0" else f".{count}"


def _directory() -> Path:
    path = os.environ.get(EXIT_FILE)
    if path is not None:
        return Path(path).parent / f"ranks{_start_suffix()}"
    return _of_parent("ranks", os.environ.get("MASTER_PORT", ""), _start_suffix())


def _run_file() -> Path:
    path = os.environ.get(EXIT_FILE)
    return Path(path).parent / "run" if path is not None else _of_parent("run")


def _of_parent(name: str, *words: str) -> Path:
    """A path that the ranks of a machine have in common: torchrun is the parent of each of them, and after a
    failure it may start them again."""
    # `covey --help` does without it, and waits for nothing.
    import tempfile

    parent = os.getppid()
    parts = [str(os.getuid()), str(parent), str(started(parent)), *(w for w in words if w)]
    return Path(tempfile.gettempdir()) / f"covey-{name}-{'-'.join(parts)}"


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where it is not there, or has ended and
    is only waited for. Elsewhere than on Linux it is 0 for every process that is there."""
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    words = _stat(pid)
    return int(words[19]) if words and words[0] not in "ZX" else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where nobody can tell, and for one that is traced by a
    debugger."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; nothing where it is not there."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in brackets may hold anything; the state is the first word behind it, the time the
            # 20th.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
