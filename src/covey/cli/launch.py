"""The training processes of this machine: torchrun as a child, its signals and its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from covey.cli.ranks import exit_code
from covey.cli.signals import CODES
from covey.exits import LAUNCHER, launcher_words
from covey.meeting import EXIT_FILE, is_stopped, started
from covey.plan.check_launch import Machines
from covey.plan.launchers import RANK_NAMES

_POLL_S = 1.0
# Longer than the 40 seconds for which the other machines wait for a sign.
_STOPPED_S = 60.0
# The second Ctrl-C ends a run without a save, and the third one a process that does not react.
_KILLING_SIGNAL = 3

OUTPUT_DIR = "COVEY_OUTPUT_DIR"
"""The environment variable with the output_dir that the launching process counted up, so that all ranks
share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is started on this machine: so many processes, which write to `output_dir` and are started again
    up to `max_restarts` times."""

    num_processes: int
    output_dir: str
    machines: Machines = field(default_factory=Machines)
    max_restarts: int = 0
    launcher: str = "torchrun"


def command(verb: str, argv: Sequence[str], start: Start) -> list[str]:
    """Return the command that runs the same verb and words in the processes of this machine."""
    if start.launcher == "ray":
        return [sys.executable, "-m", "covey.cli.ray_launcher", str(start.num_processes), verb, *argv]
    machines = start.machines
    torchrun = [sys.executable, "-m", "covey.cli.torchrun", "--nnodes", str(machines.count)]
    torchrun += ["--nproc_per_node", str(start.num_processes), "--max_restarts", str(start.max_restarts)]
    if machines.count > 1:
        # Each machine has the number that was typed for it, so that rank 0 is on the first.
        rendezvous = ["--node_rank", str(machines.number), "--master_addr", machines.address]
        rendezvous += ["--master_port", str(machines.port)]
    else:
        # Port 0 lets two runs on one machine start at the same time.
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    return [*torchrun, *rendezvous, "-m", "covey", verb, *argv]


def launch(verb: str, argv: Sequence[str], start: Start) -> int:
    """Run the verb in several processes and return the exit code of the run; SIGINT and SIGTERM are passed
    on."""
    with tempfile.TemporaryDirectory(prefix="covey-") as directory, _PassedOn() as passed_on:
        path = os.path.join(directory, "exit")
        own = {EXIT_FILE: path, OUTPUT_DIR: start.output_dir, LAUNCHER: launcher_words()}
        environment = {**os.environ, **own}
        # With Ray the cores of each machine are counted there.
        if start.launcher == "torchrun":
            threads = max(1, (os.cpu_count() or 1) // start.num_processes)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        # A cluster may have set them for its pods; torchrun sets them for each rank.
        for name in RANK_NAMES:
            environment.pop(name, None)
        # In a session of its own the child gets each signal once, from here, and not also from the terminal.
        child = subprocess.Popen(command(verb, argv, start), env=environment, start_new_session=True)
        passed_on.to(child)
        passed_on.ranks = Path(directory)
        stopped = _StoppedRanks(Path(directory))
        while start.machines.count > 1 and child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            stopped.check()
        child.wait()
        return exit_code(path, child.returncode, {CODES[number] for number in passed_on.received})


@dataclass(slots=True)
class _StoppedRanks:
    """The ranks of this machine: where all of them are stopped, none is left that could end them.

    The other machines end the run then, as they get no sign from here.
    """

    directory: Path
    _looked_at: float = 0.0
    _stopped_for: float = 0.0

    def check(self) -> None:
        """End the ranks once all of them have been stopped for longer than the other machines wait."""
        now = time.monotonic()
        # This process may have been stopped too, by a scheduler that suspends the job; that time is left out.
        passed = min(now - self._looked_at, 2 * _POLL_S)
        self._looked_at = now
        pids = _pids(self.directory)
        are_stopped = bool(pids) and all(is_stopped(pid) for pid in pids)
        self._stopped_for = self._stopped_for + passed if are_stopped else 0.0
        if self._stopped_for > _STOPPED_S:
            _send(pids, signal.SIGKILL)


def _pids(directory: Path) -> list[int]:
    """The numbers of the ranks of this machine that are there."""
    found = []
    for path in directory.glob("ranks*/rank-*-process"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid, start = path.read_text(encoding="ascii").split()
            found += [int(pid)] if str(started(int(pid))) == start else []
    return found


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class _PassedOn:
    """While it is open, signals go to the child; one that comes before the child is there goes to it too.

    torchrun passes the first one on and hears no other while it waits for the ranks to end, so a second one
    goes to the ranks themselves, and the third one ends them.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.ranks: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def to(self, child: subprocess.Popen[bytes]) -> None:
        """Pass on what was received and what comes."""
        self._child = child
        for number in self.received[:1]:
            child.send_signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._child is None:
            return
        pids = _pids(self.ranks) if self.ranks is not None and len(self.received) > 1 else []
        if pids:
            _send(pids, number if len(self.received) < _KILLING_SIGNAL else signal.SIGKILL)
        else:
            self._child.send_signal(number)

    def __enter__(self) -> _PassedOn:
        self._before = {number: signal.signal(number, self._forward) for number in CODES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
