"""Rollout servers for tests: in threads of the test's own process, or as processes that can be killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from covey.activity import Activity
from covey.models.load import load_still
from covey.models.policy import Policy
from covey.quickstart.task import MODEL_DIR
from covey.rollout.server.call import Caller
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.front import Front
from covey.rollout.server.group_send import GroupSender
from covey.rollout.server.held import HeldEngine
from covey.rollout.server.http import Access, HttpServer
from covey.rollout.server.images import HeldImages
from covey.rollout.server.remote import Server
from covey.rollout.server.wire import NO_VERSION, ServerStatus
from faults import covey_run
from support.processes import start_processes

TOKEN = "a-token-of-tests"
RUN = covey_run.__file__
SLOW = str(Path(RUN).with_name("slow_server_run.py"))


def policy_of_server(directory: Path = MODEL_DIR) -> Policy:
    """The embedded model as a server has it."""
    return load_still(directory, device=torch.device("cpu"), dtype=torch.float32)


def status_of(policy: Policy, **changes: Any) -> ServerStatus:
    """What a server of the embedded model says of itself."""
    values: dict[str, Any] = {
        **{"name": "test", "instance": "0" * 16, "engine": "native", "model": "quickstart"},
        **{"model_type": "llama", "num_parameters": 1, "vocab": policy.vocab, "max_len": 2048},
        **{"dtype": "float32", "version": NO_VERSION, "rows": 64, "noise_keys": True, "run": ""},
        **{"is_receiving": False, "publish_directory": "", "adapter_rank": 0, "base": ""},
        **{"group_device": "cpu", "swaps": True},
    }
    return ServerStatus(**{**values, **changes})


@dataclass
class Running:
    """A server in threads of this process; `failed` has what its engine raised."""

    front: Front
    http: HttpServer
    engine: Any
    address: str
    failed: list[BaseException] = field(default_factory=list)

    def caller(self, run: str = "", token: str = TOKEN, timeout_s: float = 20.0) -> Caller:
        """Who calls it."""
        return Caller(address=self.address, token=token, timeout_s=timeout_s, run=run)


@contextmanager
def running(
    policy: Policy,
    directory: Path | None = None,
    *,
    engine: Any = None,
    held_images: HeldImages | None = None,
    port: int = 0,
    **about: Any,
) -> Iterator[Running]:
    """A server on `policy`, which nothing else may use meanwhile, or with another `engine` on it."""
    engine = engine or HeldEngine(policy, max_rows=64)
    status = status_of(policy, publish_directory=str(directory or ""), **about)
    front = Front(engine, status, images=held_images)
    listening = socket.create_server(("127.0.0.1", port))
    access = Access(
        token=TOKEN, bucket_bytes=1 << 22, publish_directory=directory, device=torch.device("cpu")
    )
    http = HttpServer(listening, front, access)
    server = Running(front, http, engine, f"http://127.0.0.1:{listening.getsockname()[1]}")

    def serve() -> None:
        try:
            front.serve()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            server.failed.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    http.start()
    thread.start()
    try:
        yield server
    finally:
        front.close()
        http.shutdown()
        http.server_close()
        thread.join(5)


# What a server of the embedded model says of it.
QUICKSTART: dict[str, Any] = {"model_type": "qwen2", "num_parameters": 829568, "rows": 16}


class SlowEngine(HeldEngine):
    """Rests between two strides, so that versions are published while rows run."""

    rest_s = 0.03

    @property
    def on_turn(self) -> Callable[[], None]:
        """Called between two strides."""
        return super().on_turn

    @on_turn.setter
    def on_turn(self, call: Callable[[], None]) -> None:
        def slowly() -> None:
            call()
            time.sleep(self.rest_s)

        self._engine.on_turn = slowly


@contextmanager
def slow_server(policy: Policy | None = None, rest_s: float = 0.03) -> Iterator[Running]:
    """A server of the embedded model that takes its time."""
    policy = policy or policy_of_server()
    engine = SlowEngine(policy, max_rows=16)
    engine.rest_s = rest_s
    with running(policy, engine=engine, **QUICKSTART) as found:
        yield found
        assert found.failed == []


def token_file(folder: Path) -> Path:
    """The file of the token of these servers."""
    file = folder / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


def engine_on(
    addresses: Sequence[str],
    *,
    token: str = TOKEN,
    timeout_s: float = 20.0,
    run: str = "run-1",
    group_ports: Sequence[int] = (),
    **more: Any,
) -> ServerEngine:
    """The engine of a run on these servers, with process groups at these ports where any are named."""
    servers = [
        Server(Caller(address=address, token=token, timeout_s=timeout_s, run=run), f"test {run}")
        for address in addresses
    ]
    for server, port in zip(servers, group_ports, strict=bool(group_ports)):
        server.group = GroupSender(server.caller, port)
    given = {"publishes": True, "noise_keys": True, **more}
    return ServerEngine(servers, given.pop("activity", Activity()), timeout_s=timeout_s, **given)


@dataclass
class Process:
    """`covey rollout` in a process of its own."""

    process: BaseProcess
    token_file: Path
    log: Path
    address: str = ""

    @property
    def token(self) -> str:
        """What every call brings."""
        return self.token_file.read_text().strip()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def code(self) -> int | None:
        """What it has ended with; None while it runs."""
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        """A signal, where it is still there."""
        if self.code is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()

    def ends_with(self, seconds: float) -> int | None:
        """What it ends with in time; None where it does not."""
        self.process.join(seconds)
        return self.code


@contextmanager
def processes(
    folder: Path,
    count: int = 1,
    *words: str,
    port: int = 0,
    model: str = "quickstart",
    rest_s: float = 0.0,
) -> Iterator[list[Process]]:
    """Servers of a model with one token, ready to be used; they end with the block. With `rest_s` they take
    their time as `SlowEngine` does."""
    token_file, started = folder / "servers.token", []
    try:
        for number in range(count):
            given = ["--model", model, "--port", str(port), "--token_file", str(token_file), *words]
            started.append(_process(folder, token_file, given, rest_s))
            if number == 0:
                # The first one writes the token that the others read.
                _wait_until(lambda: token_file.is_file() and bool(token_file.read_text()), started[0])
        for server in started:
            _wait_until(lambda server=server: "ready" in server.log.read_text(), server)
            found = re.search(r"^ready +(\S+)$", server.log.read_text(), re.MULTILINE)
            assert found is not None
            server.address = found[1]
        yield started
    finally:
        for server in started:
            server.kill()


def _process(folder: Path, token_file: Path, words: Sequence[str], rest_s: float) -> Process:
    given = ("rollout", *words)
    process, log = program(folder, SLOW, str(rest_s), *given) if rest_s else covey(folder, *given)
    return Process(process, token_file, log)


def covey(folder: Path, *words: str) -> tuple[BaseProcess, Path]:
    """The command in a process of its own, in `folder`, and the file of what it says."""
    return program(folder, RUN, *words)


def program(folder: Path, file: str, *words: str) -> tuple[BaseProcess, Path]:
    """A file as a program in a process of its own, in `folder`, and the file of what it says."""
    said = Path(tempfile.mkdtemp(prefix="said-", dir=folder))
    (process,) = start_processes(file, *words, processes=1, said=said, folder=folder)
    return process, said / "0"


def _wait_until(is_there: Callable[[], bool], server: Process) -> None:
    end = time.monotonic() + 120
    while not (server.log.is_file() and is_there()):
        assert server.code is None and time.monotonic() < end, server.log.read_text()
        time.sleep(0.05)
