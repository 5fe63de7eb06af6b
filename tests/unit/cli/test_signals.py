"""SIGTERM and Ctrl-C end a command wherever its main thread is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.cli.signals import Terminated, ends_on_signals
from covey.meeting import EXIT_FILE
from support.verbs import rank_variables

# The main thread hears of no signal while it sleeps in C, like one that waits in the store where ranks meet.
DEAF = """
import ctypes, signal
from covey.cli.signals import CODES, ends_on_signals
with ends_on_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, list(CODES))
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_main_thread_that_does_not_hear(number: int, code: int, tmp_path: Path) -> None:
    environment = {**os.environ, EXIT_FILE: str(tmp_path / "exit"), "RANK": "0"}
    started = subprocess.Popen(
        [sys.executable, "-c", DEAF],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    # It has said so, and begins to sleep.
    time.sleep(1.0)
    asked = time.monotonic()
    started.send_signal(number)
    assert started.wait(timeout=20) == code
    assert 0.5 < time.monotonic() - asked < 10
    assert not (tmp_path / "exit").exists()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_main_thread_that_hears(number: int, error: type[BaseException]) -> None:
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(error), ends_on_signals():
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert {n: signal.getsignal(n) for n in before} == before
    time.sleep(1.2)  # the thread has ended with the block, or this process would be gone
    signal.signal(signal.SIGINT, own)


def test_the_signals_of_a_run_are_its_own() -> None:
    heard = []
    with ends_on_signals():
        before = signal.signal(signal.SIGTERM, lambda *_: heard.append("run"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2)
        signal.signal(signal.SIGTERM, before)
    assert heard == ["run"]


@pytest.mark.multi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_others(rank: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = "--model quickstart --dataset quickstart#64 --reward_funcs accuracy --max_completion_length 8"
    environment = {**os.environ, **rank_variables(rank, 2), "MASTER_PORT": port}
    started = subprocess.Popen(
        [sys.executable, "-c", WAITS, "train", *words.split()],
        env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stderr is not None
    said = next(line for line in started.stderr if line.startswith("covey:"))
    assert said == f"covey: rank {rank} of 2 waits for the other ranks at 127.0.0.1:{port}\n"
    asked = time.monotonic()
    started.terminate()
    assert started.wait(timeout=30) == 143
    assert time.monotonic() - asked < 10


WAITS = """
import sys
from covey.training import process
process._PATIENCE_S = 0.5
from covey.cli.main import main
sys.exit(main())
"""
