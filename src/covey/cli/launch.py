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

OUTPUT_DIR = "COVEY_OUTPUT_DIR"
"""The environment variable with the output_dir that the launching process counted up, so that all ranks
share it."""

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def command(verb: str, argv: Sequence[str], num_processes: int) -> list[str]:
    """Return the command that runs the same verb and words in `num_processes` processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
    # Port 0 lets two runs on one machine start at the same time.
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    return [*torchrun, *rendezvous, "-m", "covey", verb, *argv]


def launch(verb: str, argv: Sequence[str], num_processes: int, output_dir: str) -> int:
    """Run the verb in several processes and return the exit code of the run; SIGINT and SIGTERM are passed
    on."""
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        path = os.path.join(directory, "exit")
        threads = max(1, (os.cpu_count() or 1) // num_processes)
        own = {EXIT_FILE: path, OUTPUT_DIR: output_dir}
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **own}
        # In a session of its own the child gets each signal once, from here, and not also from the terminal.
        child = subprocess.Popen(command(verb, argv, num_processes), env=environment, start_new_session=True)
        received = _wait(child)
        return exit_code(path, child.returncode, {_CODES[number] for number in received})


def _wait(child: subprocess.Popen[bytes]) -> set[signal.Signals]:
    """Wait for the child to end; return the signals that came in between."""
    received: set[signal.Signals] = set()

    def forward(number: int, frame: FrameType | None) -> None:
        received.add(signal.Signals(number))
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _CODES}
    try:
        child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return received
