"""Several training processes on this machine: torchrun as a child, its signals and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType

from covey.cli.ranks import EXIT_FILE, exit_code
from covey.cli.signals import CODES
from covey.exits import LAUNCHER, launcher_words

OUTPUT_DIR = "COVEY_OUTPUT_DIR"
"""The environment variable with the output_dir that the launching process counted up, so that all ranks
share it."""


def command(verb: str, argv: Sequence[str], num_processes: int) -> list[str]:
    """Return the command that runs the same verb and words in `num_processes` processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    torchrun += ["--nproc_per_node", str(num_processes)]
    # Port 0 lets two runs on one machine start at the same time.
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    return [*torchrun, *rendezvous, "-m", "covey", verb, *argv]


def launch(verb: str, argv: Sequence[str], num_processes: int, output_dir: str) -> int:
    """Run the verb in several processes and return the exit code of the run; SIGINT and SIGTERM are passed
    on."""
    with tempfile.TemporaryDirectory(prefix="covey-") as directory, _PassedOn() as passed_on:
        path = os.path.join(directory, "exit")
        threads = max(1, (os.cpu_count() or 1) // num_processes)
        own = {EXIT_FILE: path, OUTPUT_DIR: output_dir, LAUNCHER: launcher_words()}
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **own}
        # In a session of its own the child gets each signal once, from here, and not also from the terminal.
        child = subprocess.Popen(command(verb, argv, num_processes), env=environment, start_new_session=True)
        passed_on.to(child)
        child.wait()
        return exit_code(path, child.returncode, {CODES[number] for number in passed_on.received})


class _PassedOn:
    """While it is open, signals go to the child; one that comes before the child is there goes to it too."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._child: subprocess.Popen[bytes] | None = None

    def to(self, child: subprocess.Popen[bytes]) -> None:
        """Pass on what was received and what comes."""
        self._child = child
        for number in self.received[:1]:
            child.send_signal(number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._child is not None:
            self._child.send_signal(number)

    def __enter__(self) -> _PassedOn:
        self._before = {number: signal.signal(number, self._forward) for number in CODES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
