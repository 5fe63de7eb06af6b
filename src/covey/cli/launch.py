"""The training processes of this machine: torchrun as a child, its signals and its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from covey.checks.launch import Machines
from covey.cli import show
from covey.cli.ending import Ending, killed
from covey.cli.ranks import exit_code, last_start, left_code
from covey.cli.signals import CODES
from covey.exits import LAUNCHER, launcher_words
from covey.meeting import EXIT_FILE, is_stopped, started
from covey.plan.launchers import RANK_NAMES
from covey.texts import tr
from covey.texts.language import language_of
from covey.training import failure

_POLL_S = 1.0
# A rank that has said that it ends is there for a moment more.
_POLLS_UNTIL_GONE = 3
# A shell's exit code of a process that a signal ended is this and the number of the signal.
_OF_SIGNAL = 128
# Longer than the 40 seconds for which the other machines wait for a sign.
_STOPPED_S = 60.0

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


def launch(verb: str, argv: Sequence[str], start: Start, handed: Mapping[str, str]) -> int:
    """Run the verb in several processes and return the exit code of the run; SIGINT and SIGTERM are passed
    on, and the ranks have the time that they need to save. `handed` is added to their environment."""
    ending = Ending(Path(start.output_dir))
    with tempfile.TemporaryDirectory(prefix="covey-") as directory, _PassedOn(ending) as passed_on:
        path = os.path.join(directory, "exit")
        own = {EXIT_FILE: path, OUTPUT_DIR: start.output_dir, LAUNCHER: launcher_words()}
        environment = {**os.environ, **own, **handed}
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
        ranks = _RanksHere(Path(directory), ending)
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            if ending.received or start.machines.count > 1:
                ranks.end_stopped()
            if ending.received:
                ranks.end_overdue()
            elif ranks.have_saved_for_another():
                # torchrun would wait five minutes for that of the machine that got the signal.
                child.send_signal(signal.SIGTERM)
        return _code_of(path, child.returncode, ending, start.machines)


def _code_of(path: str, returncode: int, ending: Ending, machines: Machines) -> int:
    """The exit code of a run that has ended; where its ranks were killed, and none was left to say so, this
    process does."""
    by_signal = -returncode if returncode < 0 else returncode - _OF_SIGNAL
    are_killed = by_signal > 0 and by_signal not in CODES and not ending.is_hurried
    if are_killed and left_code(path) is None and (lost := _gone(path)):
        finding = killed(lost, ending)
        if machines.count == 1:
            # The ranks of other machines record it.
            failure.record(finding, ending.output_dir, None)
        show.finding(finding, language_of(os.environ))
    return exit_code(path, returncode, ending)


@dataclass(slots=True)
class _RanksHere:
    """The ranks of this machine, as the process that launched them sees them."""

    directory: Path
    ending: Ending
    _looked_at: float = 0.0
    _stopped_for: float = 0.0
    _seen: dict[int, int | None] = field(default_factory=dict)
    _polls_without_ranks: int = 0

    def have_saved_for_another(self) -> bool:
        """Whether the ranks have ended for a signal that another machine got; True once."""
        left = left_code(str(self.directory / "exit"))
        self._polls_without_ranks += left in CODES.values() and not _pids(self.directory)
        return self._polls_without_ranks == _POLLS_UNTIL_GONE

    def end_overdue(self) -> None:
        """After a signal: end the ranks that do not end by themselves."""
        self._seen |= {pid: started(pid) for pid in _pids(self.directory)}
        # A rank that ends by itself says so first, and may still hang after that.
        left = [pid for pid, start in self._seen.items() if start is not None and started(pid) == start]
        if left and self.ending.is_overdue(has_one_ended=len(left) < len(self._seen)):
            _send(left, signal.SIGKILL)

    def end_stopped(self) -> None:
        """End the ranks once all of them have been stopped for longer than the other machines wait: none is
        left that could end them, and the other machines, without a sign from here, have ended the run."""
        now = time.monotonic()
        # This process may have been stopped too, by a scheduler that suspends the job; that time is left out.
        passed = min(now - self._looked_at, 2 * _POLL_S)
        self._looked_at = now
        pids = _pids(self.directory)
        are_stopped = bool(pids) and all(is_stopped(pid) for pid in pids)
        self._stopped_for = self._stopped_for + passed if are_stopped else 0.0
        if self._stopped_for > _STOPPED_S:
            self.ending.why = tr(
                "All of them had been stopped for {seconds:.0f} s (SIGSTOP).", seconds=self._stopped_for
            )
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


def _gone(path: str) -> list[int]:
    """The ranks of the last start that are not there any more and have not said that they end."""
    found = []
    for file in Path(path).parent.glob(f"ranks{last_start(path)}/rank-*-process"):
        with contextlib.suppress(OSError, ValueError):
            pid, start = file.read_text(encoding="ascii").split()
            found += [int(file.name.split("-")[1])] if str(started(int(pid))) != start else []
    return sorted(found)


class _PassedOn:
    """While it is open, signals go to the child; one that comes before the child is there goes to it too.

    torchrun passes the first one on and hears no other while it waits for the ranks to end, so a second one
    goes to the ranks themselves.
    """

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.ranks: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def to(self, child: subprocess.Popen[bytes]) -> None:
        """Pass on what was received and what comes."""
        self._child = child
        for number in self.ending.received[:1]:
            child.send_signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        for_ranks = self.ending.receive(number)
        if self._child is None:
            return
        is_first = len(self.ending.received) == 1
        pids = [] if is_first or self.ranks is None else _pids(self.ranks)
        if pids:
            _send(pids, for_ranks)
        else:
            self._child.send_signal(number)

    def __enter__(self) -> _PassedOn:
        self._before = {number: signal.signal(number, self._forward) for number in CODES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
