"""Which way of shutting programs off works here: found by trying, and said by what the trial saw."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from covey.rewards.sandbox.host import (
    ENVIRONMENT,
    Limits,
    SandboxError,
    Way,
    bare_ways,
    endings,
    ways,
)
from covey.texts import joined, tr

_TRIAL_S = 20.0

# What each layer is called, in the order in which they are printed.
LAYERS = (
    tr("another user"),
    tr("no network"),
    tr("other processes are hidden"),
    tr("only Python's own files, read-only"),
    tr("empty environment"),
    tr("limits"),
)

# Runs as a program of the model would, and says what it finds. A thread that cannot start ends it: one that
# counts all processes of a user, as Linux did before 5.14, would end honest programs too.
_TRIAL = r"""
import json, os, resource, socket, threading
given = json.loads(input())
started = threading.Thread(target=lambda: None)
started.start()
started.join()

def fails(what, *kinds):
    try:
        what()
    except kinds:
        return True
    return False

def make(folder):
    path = os.path.join(folder, given["name"])
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)

def dial():
    socket.create_connection(("127.0.0.1", given["port"]), 5).close()

folders = ["/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/usr", os.getcwd(), *given["folders"]]
print(json.dumps({
    "user": os.getuid(),
    "no network": fails(dial, OSError),
    "other processes are hidden": fails(lambda: os.kill(given["pid"], 0), ProcessLookupError),
    "files": not any(map(os.path.exists, ["/etc/passwd", "/proc/self", "/sys/kernel", given["witness"]])),
    "read-only": all(fails(lambda: make(folder), OSError) for folder in folders),
    "environment": sorted(os.environ),
    "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] for name in given["limits"]],
}))
"""


class Unisolated(SandboxError):
    """Nothing here shuts a program off; `reasons` has a sentence for each way that was tried."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__(joined("; ", reasons))


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """A way that works, its name, the limits of a test, which layers its trial found in place, and why no
    better way was taken."""

    way: Way
    name: str
    limits: Limits
    has: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def lacks(self) -> tuple[str, ...]:
        """The layers that are not in place."""
        return tuple(layer for layer in LAYERS if layer not in self.has)

    def words(self) -> tuple[str, str]:
        """`programs run under bubblewrap 0.8.0: another user, no network, …` and `a test has 5 s of …`."""
        most = self.limits
        parts = (
            tr(", {processes} processes and threads", processes=most.processes)
            if most.processes is not None
            else ""
        )
        layers = tr(
            "programs run under {name}: {has}",
            name=self.name,
            has=joined(", ", self.has) if self.has else tr("no isolation layers"),
        )
        return (
            layers,
            tr(
                "each test may use {cpu_s} s of CPU time, and each process {memory_bytes} GiB{parts}",
                cpu_s=most.cpu_s,
                memory_bytes=most.memory_bytes >> 30,
                parts=parts,
            ),
        )


def isolate(limits: Limits | None = None, *, unsafe: bool = False) -> Isolation:
    """The first way here that has every layer.

    Where none has, Unisolated; with `unsafe` what can be had without bubblewrap, some layers of which lack.
    """
    reasons = []
    for way in ways():
        try:
            isolation = tried(way, limits or Limits())
        except SandboxError as error:
            # What comes next is the same without this.
            if not way.is_innermost:
                reasons.append(tr("{name}: {error}", name=_name(way), error=error))
            continue
        if not isolation.lacks:
            return isolation
        reasons.append(
            tr("{name} does not provide: {lacks}", name=isolation.name, lacks=joined(", ", isolation.lacks))
        )
    if not reasons:
        reasons.append(tr("bubblewrap is not installed"))
    for way in bare_ways() if unsafe else ():
        try:
            return replace(tried(way, _countable(limits or Limits(), way)), reasons=tuple(reasons))
        except SandboxError as error:
            reasons.append(tr("{name}: {error}", name=_name(way), error=error))
    raise Unisolated(tuple(reasons))


def tried(way: Way, limits: Limits) -> Isolation:
    """What a program meets on this way; SandboxError where none can run."""
    numbers = _numbers(limits)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)  # any user could read what is in it, but for the sandbox
        witness = os.path.join(folder, "witness")
        with open(witness, "w") as file:
            file.write("seen")
        given = {
            "pid": os.getpid(),
            "port": server.getsockname()[1],
            "witness": witness,
            "name": f"covey-trial-{os.getpid()}",
            "folders": [folder],
            "limits": list(numbers),
        }
        test = {"input": json.dumps(given) + "\n"}
        ending = next(endings(way, _TRIAL, [test], limits, _TRIAL_S))
    try:
        saw = dict(json.loads(ending.output))
    except (ValueError, TypeError):
        raise SandboxError(
            tr("a program that starts a thread ended with {ended}", ended=ending.ended)
        ) from None
    return Isolation(way=way, name=_name(way), limits=limits, has=_has(way, saw, numbers))


def _has(way: Way, saw: Mapping[str, Any], numbers: Mapping[str, int]) -> tuple[str, ...]:
    present = {
        "another user": saw["user"] != 0 and (saw["user"] != os.getuid() or way.new_user),
        "only Python's own files, read-only": saw["files"] and saw["read-only"],
        # PWD is what bubblewrap adds.
        "empty environment": set(saw["environment"]) <= {*ENVIRONMENT, "PWD"},
        "limits": saw["limits"] == list(numbers.values()) and "NPROC" in numbers,
        "no network": saw["no network"],
        "other processes are hidden": saw["other processes are hidden"],
    }
    return tuple(layer for layer in LAYERS if present[layer])


def _numbers(limits: Limits) -> dict[str, int]:
    """The limits that a program can read, by the system's names."""
    values = asdict(limits)
    names = {"CPU": "cpu_s", "AS": "memory_bytes", "NPROC": "processes", "NOFILE": "open_files"}
    numbers = {name: values[field] for name, field in names.items() if values[field] is not None}
    return {**numbers, "FSIZE": 0}


def _countable(limits: Limits, way: Way) -> Limits:
    # Without a user of its own a program would be counted together with all else that runs under this one.
    return limits if way.is_root else replace(limits, processes=None)


def _name(way: Way) -> str:
    if way.tool is None:
        return tr("a separate user only") if way.is_root else tr("no isolation")
    done = subprocess.run([way.tool, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "bubblewrap"
