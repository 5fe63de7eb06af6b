"""Why a path that a user typed cannot be read, in words, and the command that makes it readable.

The rest of covey asks `os.path` whether something exists: its functions return False for every error, where
the methods of `Path` raise if a permission is missing or a name is too long. This module says which error.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from covey.texts import Whole, tr

PathFault = Literal["permission", "name", "link", "below_file", "other"]
"""A permission is missing; no path can be called so; a link leads nowhere; what is above it is a file."""

_LONGEST_NAME = 255
_LONGEST_PATH = 4096
# What is needed of a directory on the way, of one that is read, and of a file.
_ENTER, _LIST, _READ = 0o1, 0o5, 0o4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a path cannot be read: its kind; the words that follow the path in a message; the command that
    makes it readable, or ""; and the user who can run that command, "" for the current one."""

    kind: PathFault
    words: str
    command: str = ""
    owner: str = ""


def trouble(path: str | os.PathLike[str]) -> Trouble | None:
    """Return why a file or directory cannot be read; None if it can be, or if nothing is there.

    A directory can be read if its files can be listed and opened.
    """
    path = os.path.expanduser(os.fspath(path))
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.stat(os.path.join(path, os.curdir))
        # Permission bits do not tell: root passes them, network file systems have rules of their own.
        if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return _link_to_nothing(path) if os.path.islink(path) else None
    except OSError as error:
        return trouble_of(error, path)
    except ValueError as error:
        return Trouble(kind="name", words=_unfit(path, error))
    return None


def trouble_of(error: OSError, path: str = "") -> Trouble:
    """Return the trouble behind an error of the file system; `path` is the path that was used, by default the
    error's own."""
    path = path or os.fspath(error.filename or "")
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return _no_permission(path)
        case errno.ENAMETOOLONG:
            return Trouble(kind="name", words=_too_long(path))
        case errno.ELOOP:
            return Trouble(kind="link", words=tr("is a link that leads back to itself"))
        case errno.ENOTDIR:
            file = next((one for one in _above(path) if os.path.isfile(one)), path)
            return Trouble(
                kind="below_file", words=tr("cannot exist: {file} is a file, not a directory", file=file)
            )
    return Trouble(kind="other", words=tr("cannot be read: {error}", error=error.strerror or str(error)))


def cannot_be_read(error: OSError) -> str:
    """Return an error of the file system in words, with the path that it is about."""
    if error.filename is None:
        return tr("a file cannot be read: {error}", error=error.strerror or str(error))
    return tr("{path} {words}", path=os.fspath(error.filename), words=trouble_of(error).words)


def closed_file(directory: Path, patterns: Iterable[str]) -> tuple[str, Trouble] | None:
    """Return the first file of a directory with a name of these patterns that cannot be read, and why."""
    for path in sorted(path for pattern in patterns for path in directory.glob(pattern)):
        if (found := trouble(path)) is not None:
            return str(path), found
    return None


def closed_within(directory: Path) -> str:
    """Return in words what below a directory cannot be read; "" if all of it can be.
    Hidden files and directories are left out."""

    def fail(error: OSError) -> None:
        raise error

    try:
        for folder, inner, names in os.walk(directory, onerror=fail):
            inner[:] = [name for name in inner if not name.startswith(".")]
            for name in names:
                path = os.path.join(folder, name)
                if not name.startswith(".") and (found := trouble(path)) is not None:
                    return tr("{path} {words}", path=path, words=found.words)
    except OSError as error:
        return cannot_be_read(error)
    return ""


def absence(path: str | os.PathLike[str]) -> str:
    """Return why a path cannot be used: it cannot be read, or does not exist."""
    found = trouble(path)
    return tr("is missing") if found is None else found.words


def _no_permission(path: str) -> Trouble:
    """The trouble of a missing permission: of the first parent directory that may not be entered, else of the
    path itself."""
    for directory in _above(path):
        try:
            os.stat(os.path.join(directory, os.curdir))
        except PermissionError:
            words = tr("you have no permission to enter the directory {directory}", directory=directory)
            return _denied(directory, _ENTER, words)
        except OSError:
            break
    if os.path.isdir(path):
        return _denied(path, _LIST, tr("you have no permission to list and open the files in it"))
    return _denied(path, _READ, tr("you have no permission to read it"))


def _denied(path: str, bits: int, words: str) -> Trouble:
    try:
        found = os.stat(path)
    except OSError:
        return Trouble(kind="permission", words=tr("cannot be read: {words}", words=words))
    owner = _name_of(found.st_uid)
    mode = f"{stat.S_IMODE(found.st_mode):03o}"
    words = tr("cannot be read: {words} (mode {mode}, owner {owner})", words=words, mode=mode, owner=owner)
    is_mine, is_ours = found.st_uid == os.geteuid(), found.st_gid in (os.getegid(), *os.getgroups())
    who, shift = ("u", 6) if is_mine else ("g", 3) if is_ours else ("o", 0)
    # Bits that are there already: something else than the mode says no.
    if (found.st_mode >> shift) & bits == bits:
        return Trouble(kind="permission", words=words)
    letters = "".join(letter for letter, bit in (("r", 4), ("x", 1)) if bits & bit)
    command = Whole(f"chmod {who}+{letters} {shlex.quote(path)}")
    return Trouble(kind="permission", words=words, command=command, owner="" if is_mine else owner)


def _above(path: str) -> Iterator[str]:
    """The parent directories of a path, outermost first, as the path spells them."""
    parts = path.rstrip(os.sep).split(os.sep)
    for number in range(1, len(parts)):
        yield os.sep.join(parts[:number]) or os.sep


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _link_to_nothing(path: str) -> Trouble:
    words = tr("is a link to {target}, which does not exist", target=os.readlink(path))
    return Trouble(kind="link", words=words)


def _too_long(path: str) -> str:
    longest = max(len(os.fsencode(part)) for part in path.split(os.sep))
    if longest > _LONGEST_NAME:
        return tr(
            "cannot exist: a name in it has {longest:,} bytes, and a file system takes at most {most}",
            longest=longest,
            most=_LONGEST_NAME,
        )
    return tr(
        "cannot exist: it has {length:,} bytes, and the system takes paths of less than {most:,}",
        length=len(os.fsencode(path)),
        most=_LONGEST_PATH,
    )


def _unfit(path: str, error: ValueError) -> str:
    if "\0" in path:
        return tr("cannot exist: it contains the character NUL, which ends a path")
    return tr("cannot exist: {error}", error=error)
