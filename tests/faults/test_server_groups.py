"""Weights that go to servers through process groups: the same as over HTTP, on this machine's address alone,
and a server that is killed, stopped or breaks the group is named in time."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covey.cli.listening import ports_of
from covey.errors import RunFailed
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.server import bucket, group_send
from covey.rollout.server.call import Caller, Refused
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.group import Group, join_group, later
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import DTYPES, specs_of
from faults.test_servers import WORDS
from support.servers import Running, covey, engine_on, policy_of_server, processes, running, status_of

pytestmark = pytest.mark.multi

TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """The learner's model, and those of two servers."""
    return [policy_of_server() for _ in range(3)]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the small model come in many calls."""
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1 << 17)


def free_ports(count: int) -> list[int]:
    """Ports one after the other that nothing listens on, below those that the system gives away itself."""
    while True:
        first = random.randrange(12_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return list(range(first, first + count))


def in_groups(engine: ServerEngine) -> list[bool]:
    """Whether the last publish left a group with each server."""
    return [s.group is not None and s.group._group is not None for s in engine._servers]


def listeners(pid: int) -> set[str]:
    """Addresses, without ports, on which a process listens."""
    return set(ports_of([pid]))


def until(number: int, act: Callable[[], object], weights: Iterable[Any]) -> Iterator[Any]:
    """Weights; `act` happens before one of them."""
    for at, named in enumerate(weights):
        if at == number:
            act()
        yield named


@pytest.mark.usefixtures("small_buckets")
def test_what_arrives_is_what_arrives_over_http(policies: list[Policy]) -> None:
    with running(policies[1]) as one, running(policies[2]) as two:
        plain = engine_on([one.address], run="run-2").publish(plain_weights(policies[0]), 0)
        engine = engine_on([two.address], group_ports=free_ports(1))
        names = set()
        for version in range(3):
            receipt = engine.publish(plain_weights(policies[0]), version)
            group = engine._servers[0].group
            assert receipt.members[two.address].fingerprints == plain.members[one.address].fingerprints
            assert in_groups(engine) == [True] and group is not None and group.refused == ""
            names.add(group._name)
        # One group serves all publishes.
        assert len(names) == 1
        assert engine.take_notices() == []
        changed = {name: tensor + 1 for name, tensor in plain_weights(policies[0])}
        last = engine.publish(iter(changed.items()), 3)
        assert last.members[two.address].fingerprints != receipt.members[two.address].fingerprints
        engine.close()


def test_bytes_are_made_for_those_that_take_them(
    policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = bucket.save
    monkeypatch.setattr(bucket, "save", lambda tensors: made.append(len(tensors)) or real(tensors))
    with running(policies[1]) as one, running(policies[2]) as two:
        engine = engine_on([one.address], group_ports=free_ports(1))
        engine.publish(plain_weights(policies[0]), 0)
        assert made == []
        engine.close()
        engine = engine_on([one.address, two.address], run="run-3")
        engine.publish(plain_weights(policies[0]), 0)
        assert len(made) == 1
        engine.close()


def test_a_server_listens_for_a_group_on_its_own_address(tmp_path: Path, policies: list[Policy]) -> None:
    with processes(tmp_path, 1) as (server,):
        pid = server.process.pid
        assert pid is not None and listeners(pid) == {"127.0.0.1"}
        here = listeners(os.getpid())
        (port,) = free_ports(1)
        engine = engine_on([server.address], token=server.token, group_ports=[port])
        engine.publish(plain_weights(policies[0]), 0)
        assert in_groups(engine) == [True]
        assert listeners(pid) == {"127.0.0.1"} and listeners(os.getpid()) <= here | {"127.0.0.1"}
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), 2):
            pass
        engine.close()


FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("how", FAULTS)
def test_a_server_that_fails_in_the_middle_is_named_and_the_other_goes_on(
    how: str, tmp_path: Path, policies: list[Policy]
) -> None:
    with processes(tmp_path, 2) as (first, second):
        engine = engine_on(
            [first.address, second.address],
            token=first.token,
            timeout_s=TIMEOUT_S,
            group_ports=free_ports(2),
        )
        assert len(engine.publish(plain_weights(policies[0]), 0).members) == 2
        started = time.monotonic()
        weights = until(9, lambda: second.send(FAULTS[how]), plain_weights(policies[0]))
        assert list(engine.publish(weights, 1).members) == [first.address]
        assert time.monotonic() - started < 2.5 * TIMEOUT_S
        (notice,) = engine.take_notices()
        assert notice.code == "W180" and second.address in notice.seen
        assert in_groups(engine) == [True, False]
        if how == "stopped":
            second.send(signal.SIGCONT)
            assert len(engine.publish(plain_weights(policies[0]), 2).members) == 2
            assert in_groups(engine) == [True, True]
        else:
            with processes(tmp_path, 1, port=second.port) as (again,):
                receipt = engine.publish(plain_weights(policies[0]), 2)
                assert list(receipt.members) == [first.address, again.address]
                assert in_groups(engine) == [True, True]
        engine.close()
        # What waited for the server has ended, too.
        end = time.monotonic() + 3 * TIMEOUT_S
        while any(thread.name == "weights" for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_what_a_server_refuses_is_said_before_the_group_breaks(policies: list[Policy]) -> None:
    wrong = {name: tensor.bfloat16() for name, tensor in plain_weights(policies[0])}
    with running(policies[1]) as server:
        engine = engine_on([server.address], group_ports=free_ports(1))
        started = time.monotonic()
        with pytest.raises(RunFailed, match=r"F141.*is float32 .* here, and bfloat16"):
            engine.publish(iter(wrong.items()), 0)
        assert time.monotonic() - started < 10
        engine.publish(plain_weights(policies[0]), 1)
        assert in_groups(engine) == [True]
        engine.close()


def test_a_port_that_is_taken_is_said_and_http_takes_the_weights(policies: list[Policy]) -> None:
    with running(policies[1]) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        engine = engine_on([server.address], group_ports=[port])
        for version in range(2):
            assert list(engine.publish(plain_weights(policies[0]), version).members) == [server.address]
        (notice,) = engine.take_notices()
        assert notice.code == "W183" and f"nothing can listen on 127.0.0.1, port {port}" in notice.seen
        assert "Address already in use" in notice.seen
        engine.close()


def test_a_server_whose_engine_takes_none_gets_its_weights_over_http(policies: list[Policy]) -> None:
    with running(policies[1], group_device="") as server:
        engine = engine_on([server.address], group_ports=free_ports(1))
        assert len(engine.publish(plain_weights(policies[0]), 0).members) == 1
        (notice,) = engine.take_notices()
        assert notice.code == "W183" and "does not support a process group" in notice.seen
        engine.close()


def test_a_server_on_the_gpu_of_the_run_is_not_asked(
    policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two processes on one GPU. Here both are said to be on one."""
    monkeypatch.setattr(group_send, "device_name", lambda device: "cuda GPU-1")
    sender = group_send.GroupSender(Caller(address="http://127.0.0.1:1", token="", timeout_s=1.0), 5000)
    two_gpus = status_of(policies[0], group_device="cuda GPU-0, cuda GPU-1")
    sender._open(two_gpus, "", torch.device("cuda"))
    assert sender._group is None and "uses the GPU of the training process" in sender.refused
    # Another one is.
    with pytest.raises(ConnectionRefusedError):
        sender._open(status_of(policies[0], group_device="cuda GPU-2"), "", torch.device("cuda"))


def test_several_that_take_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each passes on what it took, in order, also where a tensor is empty."""
    given = [torch.full((n, 3), float(n)) for n in (4, 0, 7, 1)]
    store, how = dist.HashStore(), {"host": "127.0.0.1", "backend": "gloo", "timeout_s": TIMEOUT_S}
    cpu, world = torch.device("cpu"), 4
    joined = [later(lambda r=r: join_group(store, "g", r, world, device=cpu, **how)) for r in range(world)]
    run, *others = [one.result(timeout=20) for one in joined]
    sent: list[tuple[int, int]] = []
    real = Group._pass_on
    monkeypatch.setattr(
        Group, "_pass_on", lambda g, tensor: sent.append((g.rank, tensor.nbytes)) or real(g, tensor)
    )
    taken = [[torch.empty_like(tensor) for tensor in given] for _ in others]

    def take(group: Group, into: list[torch.Tensor]) -> None:
        group.receive(into)
        group.finish()

    waiting = [later(lambda g=g, t=t: take(g, t)) for g, t in zip(others, taken, strict=True)]
    run.send(given)
    for one in waiting:
        one.result(timeout=20)
    assert all(torch.equal(a, b) for own in taken for a, b in zip(own, given, strict=True))
    size = sum(tensor.nbytes for tensor in given)
    assert [sum(n for rank, n in sent if rank == r) for r in range(world)] == [size, size, size, 0]
    for group in (run, *others):
        group.abort(2.0)


def test_a_run_that_has_ended_leaves_no_port_open(policies: list[Policy]) -> None:
    (port,) = free_ports(1)
    with running(policies[1]) as server:
        for run in ("run-1", "run-2"):
            engine = engine_on([server.address], run=run, group_ports=[port])
            engine.publish(plain_weights(policies[0]), 0)
            assert in_groups(engine) == [True]
            engine.close()
            end = time.monotonic() + 10
            while server.front.status().run or server.http.group._store is not None:
                assert time.monotonic() < end
                time.sleep(0.05)


def open_group(server: Running, **changes: Any) -> Any:
    body = {"port": free_ports(1)[0], "backend": "gloo", "timeout_s": 2.0, **changes}
    caller = server.caller("run-1")
    if "transfer" not in body:
        opened = caller.post("/v1/publish/begin", {"version": 0, "form": "whole"})
        body["transfer"] = opened["transfer"]
    return caller.post("/v1/publish/group", body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *[({"port": port}, "port is a number") for port in (0, 80, 65536, "5000", 5000.0, True, None)],
        *[({"backend": one}, "backend is gloo or nccl") for one in ("mpi", None, ["gloo"])],
        *[({"timeout_s": one}, "timeout_s is a number") for one in (0, -1, 1e9, "2", None, float("nan"))],
        ({"backend": "nccl"}, "no GPU with NCCL"),
    ],
)
def test_what_a_group_is_asked_with_is_checked(
    policies: list[Policy], change: dict[str, Any], words: str
) -> None:
    with running(policies[1]) as server:
        server.front.attend("run-1", "a run")
        with pytest.raises(Refused, match=words):
            open_group(server, **change)


def test_a_group_is_for_the_run_that_uses_the_server(policies: list[Policy]) -> None:
    with running(policies[1]) as server:
        with pytest.raises(Refused, match="no run attends"):
            open_group(server)
        server.front.attend("run-2", "another run")
        with pytest.raises(Refused, match="another run uses this server"):
            open_group(server)
        with pytest.raises(Refused, match="401"):
            body = {"transfer": "", "port": 5000, "backend": "gloo", "timeout_s": 2.0}
            Caller(address=server.address, token="other", timeout_s=5).post("/v1/publish/group", body)


SPEC: dict[str, Any] = {"name": "a", "dtype": "float32", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, "a list of 1"),
        ([], "a list of 1"),
        ([SPEC, SPEC], "given twice"),
        ([{**SPEC, "more": 1}], "exactly the fields"),
        ([{**SPEC, "name": ""}], "a name is text"),
        ([{**SPEC, "name": "a" * 2000}], "a name is text"),
        ([{**SPEC, "name": 3}], "a name is text"),
        ([{**SPEC, "dtype": "load"}], "has the dtype"),
        ([{**SPEC, "dtype": ["float32"]}], "has the dtype"),
        ([{**SPEC, "shape": [-1]}], "has the shape"),
        ([{**SPEC, "shape": [1.0]}], "has the shape"),
        ([{**SPEC, "shape": [True]}], "has the shape"),
        ([{**SPEC, "shape": [1] * 17}], "has the shape"),
        ([{**SPEC, "shape": [1 << 39] * 16}], "more than 48 bytes"),
        ([SPEC, {**SPEC, "name": "b"}, {**SPEC, "name": "c"}], "more than 48 bytes"),
    ],
)
def test_tensors_of_a_call_are_checked(body: Any, words: str) -> None:
    assert [spec.shape for spec in specs_of([SPEC, {**SPEC, "name": "b"}], 48)] == [(2, 3)] * 2
    with pytest.raises(WireError, match=words):
        specs_of(body, 48)


def test_dtypes_are_those_of_torch_with_their_sizes() -> None:
    for name, size in DTYPES.items():
        assert getattr(torch, name).itemsize == size


def test_a_call_for_tensors_that_nobody_sends_ends_in_time(policies: list[Policy]) -> None:
    with running(policies[1]) as server:
        server.front.attend("run-1", "a run")
        caller = server.caller("run-1")
        transfer = caller.post("/v1/publish/begin", {"version": 0, "form": "whole"})["transfer"]
        asked = {
            "transfer": transfer,
            "group": open_group(server, transfer=transfer)["group"],
            "tensors": [SPEC],
        }
        for change, words in (
            ({"group": "other"}, "not open"),
            ({"transfer": "other"}, "not open"),
            ({}, "503: the process group failed"),
            ({}, "not open"),
        ):
            started = time.monotonic()
            with pytest.raises(Refused, match=words):
                caller.post("/v1/publish/group_tensors", {**asked, **change})
            assert time.monotonic() - started < 6


def run_of(folder: Path, name: str, *words: str) -> dict[str, torch.Tensor]:
    """The weights that a short run ends with."""
    from safetensors.torch import load_file

    process, log = covey(folder, "train", *WORDS, "--max_steps", "3", "--output_dir", name, *words)
    process.join(240)
    assert process.exitcode == 0, log.read_text()
    files = list((folder / name).rglob("model*.safetensors"))
    assert files
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def test_a_run_learns_the_same_and_two_ranks_keep_their_own_group(tmp_path: Path) -> None:
    """With two processes the run has a default group of its own (DDP), beside which the servers' are made."""
    base = free_ports(2)
    with processes(tmp_path, 2) as servers:
        words = ["--rollout_servers", *(server.address for server in servers)]
        words += ["--rollout_token_file", str(servers[0].token_file)]
        over_http = run_of(tmp_path, "http", *words)
        grouped = [*words, "--vllm_server_group_port", str(max(base))]
        assert_same(run_of(tmp_path, "group", *grouped), over_http)
        assert "W183" not in (tmp_path / "group" / "events.jsonl").read_text()
        two = run_of(tmp_path, "two", *words, "--nproc_per_node", "2")
        assert_same(run_of(tmp_path, "two-group", *grouped, "--nproc_per_node", "2"), two)
        assert "W183" not in (tmp_path / "two-group" / "events.jsonl").read_text()


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
