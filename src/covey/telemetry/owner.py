"""The owner of a run directory: the one process that may write to it, in the file `run.lock`.

The system's lock on the file (flock) says on one machine whether its owner lives: it goes with the process,
however that ends, and comes with no later process that happens to have the same number. A file system that
machines share may not tell them of each other's locks, so the owner also gives a sign every few seconds: it
renews the time of the file. Times are compared on the clock of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os.path import isdir
from pathlib import Path
from typing import Any, Literal

from covey.meeting import started
from covey.plan.facts import RunOwner
from covey.texts import tr

LOCK = "run.lock"
_SIGN_EVERY_S = 5.0
_SILENT_S = 60.0
_RETRY_S = 1.0
# A file system without locks of files.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Changed(OSError):
    """The run directory, or its lock, was deleted or replaced while the run went on."""


@dataclass(slots=True)
class Lock:
    """The directory is this process's until `release`."""

    path: Path
    descriptor: int
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Give a sign every few seconds from now on."""
        threading.Thread(target=self._give_signs, name="lock", daemon=True).start()

    def _give_signs(self) -> None:
        while not self._stop.wait(_SIGN_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)

    def check(self) -> None:
        """Raise Changed where the directory no longer holds this lock."""
        if _is_at(self.descriptor, self.path):
            return
        if not isdir(self.path.parent):
            raise Changed(errno.ENOENT, tr("the directory was deleted while the run was writing to it"))
        raise Changed(
            errno.ENOENT, tr("its {lock} was deleted or replaced while the run was writing to it", lock=LOCK)
        )

    def release(self) -> None:
        """Let another process have the directory."""
        self._stop.set()
        if _is_at(self.descriptor, self.path):
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self.descriptor)


def take(output_dir: Path) -> Lock | RunOwner:
    """Own a directory, or say who does.

    A lock that its owner did not take back, after a kill or a loss of power, is taken over. OSError where
    there can be no lock, such as a directory in the place of the file.
    """
    path = output_dir / LOCK
    until = time.monotonic() + _RETRY_S
    while True:
        descriptor, may_write = _open(path)
        try:
            owner = _judge(descriptor, path, fcntl.LOCK_EX)
            if not _is_at(descriptor, path):
                # Its owner has just ended, and taken the file away.
                owner = None
            elif owner is None and may_write:
                _write(descriptor)
                lock, descriptor = Lock(path, descriptor), -1
                lock.start()
                return lock
            elif owner is None:
                path.unlink()
            # Whoever only looks holds the file for a moment, too.
            if owner is not None and time.monotonic() > until:
                return owner
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(0.02)


def owner_of(output_dir: Path) -> RunOwner | None:
    """The process that writes to a directory now; None where there is none, or nobody can tell."""
    path = output_dir / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _judge(descriptor, path, fcntl.LOCK_SH)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, which is made where there is none, and whether it may be written."""
    flags = os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags, 0o644), True
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW), False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _judge(descriptor: int, path: Path, kind: int) -> RunOwner | None:
    """The living owner of the file, or None; the file is locked then."""
    state = _lock(descriptor, kind)
    said = _read(descriptor)
    sign_s = max(0.0, _now(path) - os.fstat(descriptor).st_mtime)
    owner = RunOwner(
        pid=_whole(said.get("pid")),
        host=str(said.get("host", "")),
        since=str(said.get("since", "")),
        sign_s=sign_s,
        path=str(path),
        is_here=state == "held" and said.get("machine") == _machine(),
    )
    if state == "held":
        return owner
    if not said:
        # Rubbish, or a file that a kill left empty.
        return None
    if said.get("machine") == _machine():
        # Where the system has locks its process is gone, as it holds none.
        return owner if state == "unknown" and _lives(said) else None
    return owner if sign_s < _SILENT_S else None


def _lock(descriptor: int, kind: int) -> Literal["held", "free", "unknown"]:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return "unknown"
        raise
    return "free"


def _read(descriptor: int) -> dict[str, Any]:
    """What the owner wrote of itself; nothing where it is no JSON."""
    try:
        record = json.loads(os.pread(descriptor, 1 << 16, 0).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _write(descriptor: int) -> None:
    own = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "started": started(os.getpid()),
        "machine": _machine(),
    }
    content = (json.dumps(own) + "\n").encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _machine() -> str:
    """This start of this machine, and its view of processes: containers of one machine have views of their
    own, and two machines may have one name."""
    parts = [_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _lives(said: dict[str, Any]) -> bool:
    """Whether the process is there, and is the one that was meant: numbers are used again."""
    pid = _whole(said.get("pid"))
    return pid > 0 and started(pid) is not None and started(pid) == said.get("started")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _now(path: Path) -> float:
    """The time on the clock of the file system."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".covey-", dir=path.parent) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
