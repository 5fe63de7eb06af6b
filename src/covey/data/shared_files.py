"""Files that the processes of a machine share: the first process that needs one writes it, the others find
it.

They lie in the directory for temporary files, under names that follow from what they hold, and stay there for
later runs: at most 2 GB of them, and none that nobody has used for 3 days.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_KEPT_BYTES = 2 * 2**30
_KEPT_S = 3 * 24 * 3600.0
_PAUSE_S = 0.05


def shared_file(name: str, write: Callable[[Path], None]) -> Path | None:
    """The file of a name, made by `write` where it is not there yet; it is there whole or not at all.

    While one process writes the others wait. None where the file cannot be had: no directory of this user can
    be made, the disk is full, or `write` has raised in another process while this one waited. What `write`
    raises beside an OSError goes on to its caller.
    """
    try:
        path = _folder() / name
        since = time.time()
        while True:
            if _is_there(path):
                return path
            if _has_failed(path, since):
                return None
            with _lock(path) as is_mine:
                if is_mine and not _is_there(path) and not _has_failed(path, since):
                    return _written(path, write)
            time.sleep(_PAUSE_S)
    except OSError:
        return None


def _folder() -> Path:
    """The directory of this user on this machine; another machine may see the same disk."""
    folder = Path(tempfile.gettempdir()) / f"covey-shared-{os.getuid()}-{platform.node() or 'machine'}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(folder)
    return folder


def _is_there(path: Path) -> bool:
    """Whether the file is there; then it counts as used now."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _failure(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


def _has_failed(path: Path, since: float) -> bool:
    try:
        return _failure(path).stat().st_mtime >= since
    except FileNotFoundError:
        return False


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether this process may write the file; the system takes the lock back from one that is killed."""
    lock = path.with_name(f"{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    # Two that write at once, as when a lock is swept, do not meet in one file.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _sweep(path.parent)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        write(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
            _failure(path).touch(mode=0o600)
        raise
    with contextlib.suppress(OSError):
        _failure(path).unlink(missing_ok=True)
        _sweep(path.parent, newest=path)
    return path


def _sweep(folder: Path, newest: Path | None = None) -> None:
    """Remove what a killed process left half written, what nobody has used for long, and the oldest files
    beyond 2 GB, `newest` aside. A process that has mapped a removed file still reads it."""
    now, kept = time.time(), []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if path.suffix == ".part":
                with _lock(path.with_name(path.name.rsplit(".", 2)[0])) as is_free:
                    if is_free:
                        path.unlink()
            elif now - found.st_mtime > _KEPT_S:
                path.unlink()
            elif path != newest and path.suffix not in (".lock", ".failed"):
                kept.append((found.st_mtime, found.st_size, path))
    total = 0 if newest is None else newest.stat().st_size
    for _, size, path in sorted(kept, reverse=True):
        total += size
        if total > _KEPT_BYTES:
            path.unlink(missing_ok=True)
