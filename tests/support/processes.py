"""A file of the tests in processes of its own, which find torch, transformers and covey imported.

They are forks of one process that has imported them and done nothing else: seconds of each start, on a slow
machine most of a test. What `covey` does from its start on is for tests that call the command.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ("covey.training.run", "covey.learner.backends.ddp", "transformers.models.llama.modeling_llama")


def run_in_processes(
    file: str,
    *arguments: object,
    processes: int = 2,
    timeout: float = 180,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    machine: int = 0,
) -> None:
    """Run a file as a program with these arguments, in `folder`; fail where one process fails or lasts.

    More than one are the ranks of a run on this machine, which join each other by themselves. With `machine`
    the launcher says of each so many that they are alone on theirs.
    """
    with tempfile.TemporaryDirectory() as said:
        started = start_processes(
            file,
            *arguments,
            processes=processes,
            said=said,
            environment=environment,
            folder=folder,
            machine=machine,
        )
        codes = _codes(started, timeout)
        output = "\n".join(path.read_text()[-4000:] for path in sorted(Path(said).iterdir()))
    assert not any(codes), f"exit codes {codes}\n{output}"


def start_processes(
    file: str,
    *arguments: object,
    processes: int,
    said: Path | str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    machine: int = 0,
) -> list[BaseProcess]:
    """Start the processes of `run_in_processes` and return them; what each says is in `said`, by its rank."""
    _begin()
    words = [file, *map(str, arguments)]
    port, started = _free_port(), []
    for rank in range(processes):
        own = {**_rank(rank, processes, port, machine), **(environment or {})}
        given = words, own, str(folder or Path.cwd()), f"{said}/{rank}"
        started.append(_CONTEXT.Process(target=_run, args=given))
        started[-1].start()
    return started


def _begin() -> None:
    """Start the process to fork, once; what it imports reads then whether the hub may be asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        _CONTEXT.set_forkserver_preload(list(_IMPORTED))
        forkserver.ensure_running()


def rank_environment(processes: int) -> list[dict[str, str]]:
    """What torchrun would tell each rank of a run on this machine."""
    port = _free_port()
    return [_rank(rank, processes, port) for rank in range(processes)]


def _rank(rank: int, processes: int, port: int, machine: int = 0) -> dict[str, str]:
    """What torchrun would tell a rank, where each machine has so many."""
    if processes == 1:
        return {}
    own = machine or processes
    numbers = {"RANK": rank, "LOCAL_RANK": rank % own, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": own}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**numbers, **place}.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _codes(started: list[BaseProcess], timeout: float) -> list[int | None]:
    """The exit code of each; the others end with the first that fails, and all when the time is over."""
    end = time.monotonic() + timeout
    try:
        while running := [p.sentinel for p in started if p.exitcode is None]:
            if any(p.exitcode for p in started) or not wait(running, end - time.monotonic()):
                break
    finally:
        for process in started:
            if process.exitcode is None:
                process.kill()
            process.join()
    return [process.exitcode for process in started]


def _run(words: list[str], environment: Mapping[str, str], folder: str, said: str) -> None:
    """The program itself, in a fork."""
    os.environ.update(environment)
    os.chdir(folder)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # One that is killed by a fault of native code says where.
    faulthandler.enable()
    torch.set_num_threads(1)
    # DeepSpeed collects garbage for each engine of ZeRO-3, and would look at all that is imported.
    gc.freeze()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
