"""The part of the sandbox that runs in it. It is handed to Python as text and imports the standard library
alone.

Its argument is JSON, `{"user": 61184 or null, "is_bare": false}`: the user that it becomes, and whether it
runs without bubblewrap. Standard input is the job:

    {"code": "print(input())", "paths": ["…/site-packages"], "limits": {…},
     "tests": [{"input": "3\n"}, {"call": "double", "arguments": [4]}]}

Standard output is one line, `{"ready": true}`, and per test the line `{"ended": "exit 0", "bytes": 2}`
followed by so many bytes: what the program printed, or the JSON of what the function returned. What a test
expects never comes in here. From the first test on nothing in here is to be trusted: the program may do to
this process whatever it likes, and all it can gain is another output.
"""

from __future__ import annotations

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

_NO_NEW_PRIVS, _CAPABILITY_VERSION = 38, 0x20080522
_BLOCK = 65536


def main() -> None:
    """Give up every right, then run the tests of one program, each in a fork of its own."""
    config = json.loads(sys.argv[1])
    job = json.loads(_read_all(0))
    if config["user"] is not None:
        os.setgroups([])
        os.setresgid(config["user"], config["user"], config["user"])
        os.setresuid(config["user"], config["user"], config["user"])
    if config["is_bare"]:
        _give_up_rights()
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
    """Return how a test ended (`exit CODE`, `signal NAME`, `late`, `output`), and what it gave."""
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
        """Return the source, whatever the path."""
        return self._source

    def path_stats(self, path: str) -> NoReturn:
        """Raise OSError: the source is in no file, so no bytecode of it is cached."""
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
    """Return a function of the program, or a method of its class `Solution`."""
    found = getattr(module, name, None)
    return found if found is not None else getattr(module.Solution(), name)


# -- what bubblewrap does where it is used


def _give_up_rights() -> None:
    """No capability, and none to be won by starting a program."""
    # A program under bubblewrap starts milliseconds sooner without this import.
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    failed = library.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if failed or library.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "the rights of this process cannot be given up")


if __name__ == "__main__":
    main()
