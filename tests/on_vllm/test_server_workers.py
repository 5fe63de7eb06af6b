"""A server whose vLLM has two workers, each a process of its own and a rank of the group with the run: what
comes through the group is what comes over HTTP, and the run sends it once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.errors import RunFailed
from covey.rollout.server import bucket, group_send
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.group import Group
from covey.types import Receipt
from faults.test_server_groups import free_ports, in_groups, until
from support.engines import sampled
from support.servers import engine_on
from support.vllm_learner import Learner, prompts, request_of

pytestmark = [pytest.mark.vllm, pytest.mark.multi]

WORDS = (
    "rollout --model quickstart --engine vllm --port 0 --vllm_max_model_len 256 --max_rows 16 "
    "--vllm_enforce_eager true --vllm_tensor_parallel_size 2 --token_file t.token --dtype float32"
)
# Of float32 on both sides.
CLOSE = 1e-4
TIMEOUT_S = 60.0


class Started:
    """`covey rollout` in a process of its own, and where it is."""

    def __init__(self, folder: Path) -> None:
        log = folder / "server.log"
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "covey", *WORDS.split()], cwd=folder, stdout=out, stderr=out
            )
        until = time.monotonic() + 300
        while "ready " not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        self.log = log
        self.address = log.read_text().split("ready ")[1].split()[0]
        self.token = (folder / "t.token").read_text().strip()

    def engine(self, run: str, ports: list[int], timeout_s: float = TIMEOUT_S) -> ServerEngine:
        """The engine of a run on it."""
        given = {"token": self.token, "timeout_s": timeout_s, "noise_keys": False}
        return engine_on([self.address], run=run, group_ports=ports, **given)

    def workers(self) -> list[int]:
        """The processes of its workers, which are those that vLLM names so."""
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                todo += map(int, task.read_text().split())
            if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("server"))
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


def receipt_of(receipt: Receipt) -> Receipt:
    """That of the one server."""
    (member,) = receipt.members.values()
    return member


@dataclass
class Counted:
    """A process group that counts the bytes it sends, by the rank that they go to."""

    within: Any
    sent: Counter[int]

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Any:
        """Send to one rank."""
        self.sent[rank] += sum(tensor.nbytes for tensor in tensors)
        return self.within.send(tensors, rank, tag)

    def abort(self) -> None:
        """End it."""
        self.within.abort()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that leave this process through groups."""
    counter: Counter[int] = Counter()
    real = group_send.join_group

    def join(*args: Any, **named: Any) -> Group:
        group = real(*args, **named)
        group.process_group = Counted(group.process_group, counter)
        return group

    monkeypatch.setattr(group_send, "join_group", join)
    return counter


def test_what_arrives_is_what_arrives_over_http(
    server: Started, learner: Learner, sent: Counter[int]
) -> None:
    asked = [request_of(p, i) for i, p in enumerate(prompts())]
    size = sum(tensor.nbytes for tensor in learner.given.values())
    found = []
    for ports in ([], free_ports(1)):
        engine = server.engine(f"run-{len(ports)}", ports)
        for version in (0, 1):
            now = learner.changed(version)
            receipt = receipt_of(engine.publish(now.weights(), version))
            assert now.agrees_with(receipt)
            completions = sampled(engine, asked)
            assert max(map(now.gap, asked, completions)) < CLOSE
            found.append((receipt, [c.token_ids for c in completions]))
        assert in_groups(engine) == [True] * len(ports) if ports else True
        assert engine.take_notices() == []
        engine.close()
    assert found[:2] == found[2:]
    # One model for each publish, however many workers take it.
    assert sent == {1: 2 * size}


def test_a_publish_that_breaks_off_leaves_workers_that_take_the_next(
    server: Started, learner: Learner
) -> None:
    """The weights stop in the middle, and the run that sends them ends or goes on."""
    engine = server.engine("run-broken", free_ports(1), timeout_s=20.0)
    engine.publish(learner.weights(), 0)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(learner.weights())[:5]
        raise KeyError("gone")

    with pytest.raises(KeyError):
        engine.publish(broken(), 1)
    assert learner.agrees_with(receipt_of(engine.publish(learner.weights(), 2)))
    assert in_groups(engine) == [True]
    with pytest.raises(KeyError):
        engine.publish(broken(), 3)
    engine.close()
    other = server.engine("run-other", free_ports(1))
    assert learner.agrees_with(receipt_of(other.publish(learner.weights(), 0)))
    assert other.take_notices() == []
    other.close()


def test_a_worker_that_does_not_join_in_time(server: Started, learner: Learner) -> None:
    """The run names the server within its time limit, and once the worker goes on it takes weights."""
    engine = server.engine("run-late", free_ports(1), timeout_s=6.0)
    last = server.workers()[-1]
    os.kill(last, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(RunFailed, match=r"F141.*the process group with it .* could not be started"):
            engine.publish(learner.weights(), 0)
        assert time.monotonic() - started < 30
    finally:
        os.kill(last, signal.SIGCONT)
    # It waits there for its own time limit, in which another publish may come too early.
    for version in (1, 2, 3):
        with suppress(RunFailed):
            assert learner.agrees_with(receipt_of(engine.publish(learner.weights(), version)))
            break
    assert in_groups(engine) == [True]
    engine.close()


def test_a_worker_that_is_killed_in_the_middle(
    server: Started, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run names the server, and the server ends with an error and does not stand still."""
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1 << 17)
    engine = server.engine("run-killed", free_ports(1), timeout_s=20.0)
    engine.publish(learner.weights(), 0)
    weights = until(9, lambda: os.kill(server.workers()[-1], signal.SIGKILL), learner.weights())
    with pytest.raises(RunFailed, match=r"F141"):
        engine.publish(weights, 1)
    engine.close()
    assert server.process.wait(60) not in (0, None)
