"""The part of the sandbox that runs in it. It is handed to Python as text and imports the standard library
alone.

Its argument is JSON: `{"root": {…} or null, "user": 61184 or null}`. With a `root` it makes the namespaces
and the file system itself, as bubblewrap would have done before it. Standard input is the job:

    {"code": "print(input())", "paths": ["…/site-packages"], "limits": {…},
     "tests": [{"input": "3\n"}, {"call": "double", "arguments": [4]}]}

Standard output is one line, `{"ready": true}`, and per test the line `{"ended": "exit 0", "bytes": 2}`
followed by so many bytes: what the program printed, or the JSON of what the function returned. What a test
expects never comes in here. From the first test on nothing in here is to be trusted: the program may do to
this process whatever it likes, and all it can gain is another output.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Every sandbox waits for these imports; typing alone would double the time that Python takes to start.
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

_NEW_USER = 0x10000000
# Mounts, processes, network, System V and POSIX queues, host name, control groups.
_NEW_OTHERS = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR, _MNT_DETACH = -100, 0x8000, 442, 2
_PDEATHSIG, _CAPBSET_DROP, _NO_NEW_PRIVS, _CAPABILITY_VERSION = 1, 24, 38, 0x20080522
# Nothing of the machine is below it that the program is to see, so that it can be covered.
_STAGE = "/proc"
_NOBODY = 65534
_BLOCK = 65536


def main() -> None:
    """Shut this process off, then run the tests of one program, each in a fork of its own."""
    config = json.loads(sys.argv[1])
    job = json.loads(_read_all(0))
    if config["root"] is not None:
        _enter(config["root"])
    _give_up_rights(config["user"])
    if config["root"] is not None:
        _leave_first_process()
    sys.path.extend(job["paths"])
    _say({"ready": True})
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    for test in job["tests"]:
        ended, output = _run(job, test, nothing)
        _say({"ended": ended, "bytes": len(output)}, output)
        if ended == "late":
            break


def _say(line: Mapping[str, Any], data: bytes = b"") -> None:
    rest = memoryview(json.dumps(line).encode() + b"\n" + data)
    while rest:
        rest = rest[os.write(1, rest) :]


def _read_all(number: int) -> bytes:
    blocks = []
    while block := os.read(number, _BLOCK):
        blocks.append(block)
    return b"".join(blocks)


# -- one test


def _run(job: Mapping[str, Any], test: Mapping[str, Any], nothing: int) -> tuple[str, bytes]:
    """How a test ended (`exit CODE`, `signal NAME`, `late`, `output`), and what it gave."""
    mine, theirs = os.pipe()
    given = os.memfd_create("input")
    _write_all(given, test.get("input", "").encode())
    os.lseek(given, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(given, 0)
        os.dup2(nothing if "call" in test else theirs, 1)
        for number in (mine, given, nothing):
            os.close(number)
        _limit(job["limits"])
        _run_program(job["code"], test, theirs)
    os.close(theirs)
    os.close(given)
    ended, output = _await(child, mine, job["limits"])
    os.close(mine)
    return ended, output


def _write_all(number: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(number, rest) :]


def _await(child: int, mine: int, limits: Mapping[str, Any]) -> tuple[str, bytes]:
    """Read until the child ends, is late or says too much; then end its session."""
    output = bytearray()
    ends = time.monotonic() + limits["wall_s"]
    is_gone = os.pidfd_open(child)
    watched = [mine, is_gone]
    ended = None
    while ended is None:
        ready = select.select(watched, [], [], max(0.0, ends - time.monotonic()))[0]
        if not ready:
            ended = "late"
        elif mine in ready:
            block = os.read(mine, _BLOCK)
            output += block
            if not block:
                watched.remove(mine)
            if len(output) > limits["output_bytes"]:
                ended = "output"
        else:
            break
    os.close(is_gone)
    for end in (os.killpg, os.kill):
        try:
            end(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    status = os.waitpid(child, 0)[1]
    if ended is None:
        code = os.waitstatus_to_exitcode(status)
        ended = f"exit {code}" if code >= 0 else f"signal {-code}"
    if ended == f"signal {signal.SIGXCPU.value}":
        ended = "late"
    return ended, bytes(output[: limits["output_bytes"]])


def _limit(limits: Mapping[str, Any]) -> None:
    kinds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, most in kinds.items():
        if most is not None:
            # One second more for the program to end itself would be enough to count as late.
            resource.setrlimit(kind, (most, most + (kind == resource.RLIMIT_CPU)))


class _Text(SourceFileLoader):
    """A module whose source is a text; its name is that of no file."""

    def __init__(self, name: str, source: str) -> None:
        super().__init__(name, "solution.py")
        self._source = source.encode()

    def get_data(self, path: str) -> bytes:
        """The source, whatever the path."""
        return self._source

    def path_stats(self, path: str) -> NoReturn:
        """There is no file that something compiled could stand for."""
        raise OSError(path)


def _run_program(code: str, test: Mapping[str, Any], results: int) -> NoReturn:
    """The program as a script, or the function of it that the test calls; then this process ends."""
    name = "solution" if "call" in test else "__main__"
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    _Text(name, code).exec_module(module)
    if "call" in test:
        value = _function(module, test["call"])(*test["arguments"])
        # Numbers and arrays of numpy say themselves what they are as a list.
        _write_all(results, json.dumps(value, default=lambda other: other.tolist()).encode())
    sys.exit(0)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of the program, or a method of its class `Solution`."""
    found = getattr(module, name, None)
    return found if found is not None else getattr(module.Solution(), name)


# -- what bubblewrap does where it is there


def _libc(name: str, *arguments: Any) -> None:
    """A call of the C library; OSError with its name where it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(library, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _enter(root: Mapping[str, Any]) -> None:
    """New namespaces, and in them a root that holds the bound paths, read-only.

    The process that comes back is the first of its process namespace: when it ends all others there do.
    """
    uid, gid = os.getuid(), os.getgid()
    _libc("unshare", _NEW_OTHERS | (_NEW_USER if root["new_user"] else 0))
    if root["new_user"]:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_NOBODY} {uid} 1")
        _write("/proc/self/gid_map", f"{_NOBODY} {gid} 1")
        # No namespace within this one, in which the program would have every capability again.
        _write("/proc/sys/user/max_user_namespaces", "0")
    _libc("prctl", _PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    child = os.fork()
    if child:
        os.close(1)
        os.waitpid(child, 0)
        os._exit(0)
    _libc("prctl", _PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    _build(root)


def _build(root: Mapping[str, Any]) -> None:
    _libc("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _libc("mount", b"tmpfs", _STAGE.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755")
    for path, target in root["links"].items():
        os.symlink(target, _STAGE + path)
    for path in (*root["binds"], *root["devices"]):
        here = _STAGE + path
        if os.path.isdir(path):
            os.makedirs(here, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(here), exist_ok=True)
            os.close(os.open(here, os.O_CREAT))
        _libc("mount", path.encode(), here.encode(), None, _MS_BIND | _MS_REC, None)
        is_device = path in root["devices"]
        _lock(here, _ATTR_RDONLY | _ATTR_NOSUID | (0 if is_device else _ATTR_NODEV), _AT_RECURSIVE)
    _lock(_STAGE, _ATTR_RDONLY, 0)
    os.chdir(_STAGE)
    _libc("pivot_root", b".", b".")
    _libc("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _libc("sethostname", b"sandbox", 7)


def _lock(path: str, attributes: int, flags: int) -> None:
    """Set attributes of a mount, and of those below it: mount_setattr(2), Linux 5.12."""
    change = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    _libc("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, change, ctypes.sizeof(change))


def _give_up_rights(user: int | None) -> None:
    """Another user where this is root, no capability, and none to be won by starting a program."""
    _libc("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        try:
            _libc("prctl", _CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            # Past the last capability, or at once where there is no right to drop any.
            break
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _libc("capset", header, (ctypes.c_uint32 * 6)())


def _leave_first_process() -> None:
    """Go on in a child; the first process of the namespace reaps and ends with it."""
    # A change of user takes the signal away that was asked for before it.
    _libc("prctl", _PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    os.close(1)
    while os.wait()[0] != child:
        pass
    os._exit(0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
