"""Where the processes of a run on one machine leave each other small files: that one is there, that it has
something to say, that it has failed.

They are there from the start of a process on, before it has imported torch and joined any group, so a process
that is killed or stopped is seen whatever the others wait in.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EXIT_FILE = "COVEY_EXIT_FILE"
"""The environment variable with the file that rank 0 writes its exit code to."""

RAISED, SPOKE = "raised", "spoke"
"""What a rank leaves that ends by an error which it can name, and one that has said it."""

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
        if not self.directory.parent.is_dir():
            return
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(
                f"{self.directory} is not a directory that this user owns; remove it, or set TMPDIR"
            )
        for what in (RAISED, SPOKE):
            self._path(self.rank, what).unlink(missing_ok=True)
        self.put("process", f"{os.getpid()} {started(os.getpid())}")

    def go(self) -> None:
        """Let the others know that this process ends by itself; the last one removes the directory."""
        with contextlib.suppress(OSError):
            self._path(self.rank, "process").unlink(missing_ok=True)
            if not any(self.state(rank) in ("here", "stopped") for rank in self.others):
                for path in self.directory.iterdir():
                    path.unlink()
                self.directory.rmdir()

    def put(self, what: str, words: str = "") -> None:
        """Leave a file of this rank."""
        with contextlib.suppress(OSError):
            part = self._path(self.rank, f"{what}.part")
            part.write_text(words, encoding="ascii")
            os.replace(part, self._path(self.rank, what))

    def has(self, rank: int, what: str) -> bool:
        """Whether a rank has left such a file."""
        return self._path(rank, what).exists()

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


def _directory() -> Path:
    path = os.environ.get(EXIT_FILE)
    if path is not None:
        return Path(path).parent / "ranks"
    # `covey --help` does without it, and waits for nothing.
    import tempfile

    # torchrun is the parent of each of its ranks, and gives all of them one port; after a failure it may
    # start them again.
    parent = os.getppid()
    words = [os.getuid(), parent, started(parent), os.environ.get("MASTER_PORT", "")]
    words.append(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Path(tempfile.gettempdir()) / f"covey-ranks-{'-'.join(map(str, words))}"


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
