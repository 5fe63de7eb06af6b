"""The part of the sandbox that runs in covey: how one is started, and what comes out of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.texts import tr

# What a program finds in its environment, always the same; libraries of numbers start no threads.
ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_INSIDE = Path(__file__).with_name("inside.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LINKER = ("/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Users that no account has. Each sandbox is another one: processes are counted by user, and those of an
# earlier program may take a moment to be gone.
_FIRST_USER, _NUM_USERS = 61184, 4000
_NOBODY = "65534"
_LONGEST_LINE = 200
_ENDED = re.compile(r"exit \d{1,3}|signal \d{1,2}|late|output")
_BLOCK = 1 << 16
_START_S = 10.0


class SandboxError(CoveyError):
    """The sandbox itself failed before the program ran, which says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one test may take: seconds of processor and of the clock, bytes of memory and output, processes
    and threads together (None: not limited), open files."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 2 << 20
    processes: int | None = 32
    open_files: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a program is shut off.

    tool         the path of bubblewrap; None runs the program without isolation
    is_root      whether this is root: the program is another user then, from the start where `new_user`, else
                 from when the namespaces are made; without `tool` only where this is asked for
    new_user     whether a user namespace is made; without one only root can make the others
    is_innermost whether bubblewrap keeps the program from making user namespaces of its own; with `new_user`
    """

    tool: str | None
    is_root: bool = False
    new_user: bool = False
    is_innermost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a test ended, as the sandbox says, and its output.

    ended   `exit 0`, `signal 11`, `late`, `output` where that was too much, `gone` where nothing was said
    """

    ended: str
    output: bytes = b""


def bubblewrap() -> str | None:
    """The path of bubblewrap, also where conda put it beside this Python; None where it is not installed."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=os.path.join(sys.prefix, "bin"))


def ways() -> list[Way]:
    """The ways of isolation that could be open here, the best first; none without bubblewrap."""
    tool, is_root = bubblewrap(), os.getuid() == 0
    if tool is None:
        return []
    # Root makes the namespaces itself; where it may not, as in many containers, another user may. bubblewrap
    # before 0.8 has no `--disable-userns`, and in many containers /proc/sys does not let it work.
    with_user = [Way(tool=tool, is_root=is_root, new_user=True, is_innermost=last) for last in (True, False)]
    return [*([Way(tool=tool, is_root=True)] if is_root else []), *with_user]


def bare_ways() -> list[Way]:
    """The ways without isolation: as another user where this is root and that one can read Python, else as
    this one."""
    return [*([Way(tool=None, is_root=True)] if os.getuid() == 0 else []), Way(tool=None)]


def endings(
    way: Way, code: str, tests: Sequence[Mapping[str, Any]], limits: Limits, total_s: float
) -> Iterator[Ending]:
    """Run a program's tests in a fresh sandbox and say how each ended, in order; at most `total_s` seconds.

    A test is `{"input": "text for standard input"}` or `{"call": "name", "arguments": […]}`. After one that
    was late or took the sandbox with it, the rest come as `late` or `gone` without having run. SandboxError
    where it did not start.
    """
    job = {"code": code, "tests": list(tests), "limits": asdict(limits), "paths": _packages()}
    with _started(way, job) as (process, errors):
        reader = _Reader(process, time.monotonic() + _START_S)
        if reader.line() != {"ready": True}:
            raise SandboxError(_words(process, errors))
        reader.ends = time.monotonic() + total_s
        last = Ending(ended="")
        for _ in tests:
            if last.ended not in ("late", "gone"):
                last = reader.ending(limits.output_bytes)
            yield last if last.ended not in ("late", "gone") else Ending(ended=last.ended)


@contextlib.contextmanager
def _started(way: Way, job: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of a sandbox in a session of its own, and the file of its standard error; ended whole."""
    user = _FIRST_USER + secrets.randbelow(_NUM_USERS) if way.is_root else None
    first_user = user if way.new_user else None
    given, errors = os.memfd_create("job"), os.memfd_create("errors")
    try:
        with open(os.dup(given), "wb") as file:
            file.write(json.dumps(job).encode())
        os.lseek(given, 0, os.SEEK_SET)
        process = subprocess.Popen(
            command(way, None if way.new_user else user),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
            user=first_user,
            group=first_user,
            extra_groups=None if first_user is None else [],
        )
        try:
            yield process, errors
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    except OSError as error:
        raise SandboxError(tr("the sandbox could not be started: {error}", error=error)) from error
    finally:
        os.close(given)
        os.close(errors)


def command(way: Way, user: int | None) -> list[str]:
    """The command line of a sandbox that becomes this user."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    config = json.dumps({"user": user, "is_bare": way.tool is None})
    inside = [python, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _INSIDE.read_text(encoding="utf-8"), config]
    return inside if way.tool is None else [*_bwrap(way, way.tool, python), *inside]


def _bwrap(way: Way, tool: str, python: str) -> list[str]:
    """bubblewrap with its options; it always forbids new privileges."""
    links, binds = _system(python)
    words = [tool, "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    words += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try"]
    if way.new_user:
        words += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
        words += ["--disable-userns"] if way.is_innermost else []
    else:
        # What it takes to become another user, which gives them up.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path, target in links.items():
        words += ["--symlink", target, path]
    devices = _there(_DEVICES)
    # Folders that bubblewrap makes of its own accord may be closed to other users.
    for folder in sorted({str(p) for path in (*binds, *devices) for p in Path(path).parents} - {"/"}):
        words += ["--dir", folder]
    for path in binds:
        words += ["--ro-bind", path, path]
    for path in devices:
        words += ["--dev-bind", path, path]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--"]


def _system(python: str) -> tuple[dict[str, str], list[str]]:
    """What a program sees of the machine: links at the top, and the paths of Python and its packages."""
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    wanted = [path for path in _SYSTEM if path not in links]
    wanted += [str(Path(python).parents[1]), os.path.realpath(sys.base_prefix), *_packages(), *_LINKER]
    binds: list[str] = []
    for path in _there(wanted):
        if path != "/" and not any(path == held or path.startswith(f"{held}/") for held in binds):
            binds.append(path)
    return links, binds


def _packages() -> list[str]:
    """The folders of installed packages that this Python imports from."""
    names = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return sorted(names & {os.path.realpath(path) for path in sys.path})


def _there(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


class _Reader:
    """Reads what a sandbox writes, which may be anything, until a moment of the clock."""

    def __init__(self, process: subprocess.Popen[bytes], ends: float) -> None:
        assert process.stdout is not None
        self._number = process.stdout.fileno()
        self._held = bytearray()
        self.ends = ends
        self._is_late = False

    def line(self) -> Any:
        """The next line as JSON; None where there is none, or none that is short."""
        while b"\n" not in self._held[:_LONGEST_LINE]:
            if len(self._held) >= _LONGEST_LINE or not self._more():
                return None
        line, _, rest = bytes(self._held).partition(b"\n")
        self._held = bytearray(rest)
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    def ending(self, most: int) -> Ending:
        """How the next test ended; `gone` where the sandbox no longer says so."""
        line = self.line()
        if self._is_late:
            return Ending(ended="late")
        if not isinstance(line, dict) or _ENDED.fullmatch(str(line.get("ended"))) is None:
            return Ending(ended="gone")
        count = line.get("bytes")
        if not isinstance(count, int) or not 0 <= count <= most:
            return Ending(ended="gone")
        while len(self._held) < count:
            if not self._more():
                return Ending(ended="late" if self._is_late else "gone")
        output = bytes(self._held[:count])
        del self._held[:count]
        return Ending(ended=line["ended"], output=output)

    def _more(self) -> bool:
        left = self.ends - time.monotonic()
        if left <= 0 or not select.select([self._number], [], [], left)[0]:
            self._is_late = True
            return False
        block = os.read(self._number, _BLOCK)
        self._held += block
        return bool(block)


def _words(process: subprocess.Popen[bytes], errors: int) -> str:
    """Why a sandbox did not start: the last line that it wrote."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    text = os.pread(errors, 4000, max(0, os.fstat(errors).st_size - 4000)).decode(errors="replace").strip()
    return text.splitlines()[-1] if text else f"it ended without a word ({process.poll()})"
