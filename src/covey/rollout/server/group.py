"""A process group of the run and those that take its weights, through which the tensors of a publish go: the
process of the server, or each worker of its vLLM where these are processes of their own.

NCCL carries them from GPU to GPU, gloo from main memory to main memory. However many take them, the run sends
each tensor once: NCCL's broadcast does so, and with gloo, whose broadcast does not, each rank passes it on to
the next one. The run's own groups are left alone: nothing here is the default group of a process. What torch
waits for is waited for in threads of their own, as some of it has no time limit.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from covey.rollout.server.front import Refusal
from covey.rollout.server.wire import TensorSpec

GLOO, NCCL = "gloo", "nccl"
RUN, SERVER = 0, 1
"""The ranks of a group; where workers take the tensors, they are those from 1 on."""

DEVICES = ", "
"""Between the names of devices, where several workers take tensors."""

CLOSING_S = 2.0
"""How long the end of a group is waited for."""

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Clean up; the default ends the process.
_CLEAN_UP = "2"

Told = TypeVar("Told")


class GroupFailed(OSError):
    """A transfer through a group that did not come to its end; the group is of no use any more."""


def later(call: Callable[[], Told]) -> Future[Told]:
    """What a call gives, from a thread that nobody has to wait for."""
    future: Future[Told] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where a group meets: the store of a server, and the name within it. `host` is the server's address, at
    which the run has reached it."""

    host: str
    port: int
    name: str
    backend: str
    timeout_s: float


@dataclass(slots=True)
class Group:
    """The part of `rank` in a group of `world`; `device` is where its tensors lie. Its calls raise
    RuntimeError."""

    backend: str
    device: torch.device
    timeout_s: float
    rank: int
    world: int
    process_group: Any
    # What this rank still passes on.
    _passing: list[Any] = field(default_factory=list)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors that lie on the group's device, in this order."""
        self._each(tensors, self._broadcast if self.backend == NCCL else self._pass_on)
        self._wait_for_passed()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Write what is sent into tensors. Another rank may still read them: they are not to be written to
        before the next call, or `finish`, has returned."""
        self._each(tensors, self._broadcast if self.backend == NCCL else self._take)

    def finish(self) -> None:
        """Wait until what was received is passed on."""
        self._wait_for_passed()

    def _each(self, tensors: Sequence[Tensor], move: Callable[[Tensor], None]) -> None:
        with _on(self.device):
            for tensor in tensors:
                if tensor.numel():
                    move(tensor)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = RUN
        self._wait(self.process_group.broadcast([tensor], options))

    def _take(self, tensor: Tensor) -> None:
        self._wait(self.process_group.recv([tensor], self.rank - 1, 0))
        self._wait_for_passed()
        if self.rank + 1 < self.world:
            self._pass_on(tensor)

    def _pass_on(self, tensor: Tensor) -> None:
        self._passing.append(self.process_group.send([tensor], self.rank + 1, 0))

    def _wait_for_passed(self) -> None:
        while self._passing:
            self._wait(self._passing.pop(0))

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self.timeout_s))

    def abort(self, patience_s: float = 0.0) -> None:
        """End it; what waits on it ends too, with gloo at its time limit. Returns when it has ended, after
        `patience_s` at the latest: a thread that comes back from native code while Python ends aborts the
        process."""
        wait((later(self.process_group.abort),), patience_s)


def join_group(
    store: dist.Store,
    name: str,
    rank: int,
    world: int = 2,
    *,
    host: str,
    backend: str,
    device: torch.device,
    timeout_s: float,
) -> Group:
    """Be a rank of the group `name`; returns when the others are there. `host` is the address of this rank
    that the others reach: gloo listens there alone."""
    within, limit = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
    with _on(device):
        if backend == NCCL:
            made: Any = _nccl(within, rank, world, limit)
        else:
            # The options are not in torch's types.
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._threads = limit, 1
            options._devices = [gloo.create_device(hostname=host)]
            made = gloo(within, rank, world, options)
    return Group(backend, device, timeout_s, rank, world, made)


def _nccl(store: dist.Store, rank: int, world: int, limit: timedelta) -> Any:
    """A group of NCCL; one that fails must not end the process, as torch has it by default."""
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = _CLEAN_UP
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def connect_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """The store of a server."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)


def device_name(device: torch.device) -> str:
    """A device as two processes can compare it: "cpu", or a GPU with its UUID."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda {torch.cuda.get_device_properties(device).uuid}"


def group_devices(names: Sequence[str]) -> str:
    """The devices of those that take tensors: main memory once, however many they are."""
    return "cpu" if "cpu" in names else DEVICES.join(names)


class GroupHost:
    """A server's side: one group at a time, and the store at which the run finds it. `device` is where this
    process takes tensors (None: it takes none). Where the engine has `num_workers` processes of its own, each
    of them is in the group in place of this one."""

    def __init__(self, device: torch.device | None, num_workers: int = 0) -> None:
        self._device, self._num_workers = device, num_workers
        self._lock, self._receiving = threading.Lock(), threading.Lock()
        self._store: tuple[str, int, dist.Store] | None = None
        self._run = self._name = ""
        self._group: Future[Group] | None = None
        self._limit_s = 0.0

    @property
    def world(self) -> int:
        """How many ranks a group has, with the run's."""
        return 1 + (self._num_workers or 1)

    def open(self, run: str, host: str, port: int, backend: str, timeout_s: float) -> GroupPlace:
        """Wait for a run at `host` and `port`, and at no other address; returns where the group meets. It
        takes the place of the former one."""
        device = self._device
        if device is None:
            raise Refusal(409, "this server takes no process group")
        if backend == NCCL and not (device.type == "cuda" and dist.is_nccl_available()):
            raise Refusal(409, "this server has no GPU with NCCL")
        where = device if backend == NCCL else torch.device("cpu")
        with self._lock:
            self._close(keeps=(host, port))
            store = self._listen(host, port, timeout_s)
            self._run, self._name = run, (name := secrets.token_hex(8))
            self._limit_s = timeout_s
            if not self._num_workers:
                self._group = later(
                    lambda: join_group(
                        store, name, SERVER, host=host, backend=backend, device=where, timeout_s=timeout_s
                    )
                )
        return GroupPlace(host=host, port=port, name=name, backend=backend, timeout_s=timeout_s)

    def _listen(self, host: str, port: int, timeout_s: float) -> dist.Store:
        if self._store is not None:
            return self._store[2]
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Refusal(409, f"nothing can listen on {host}, port {port}: {reason}") from error
        # Without a socket of ours torch would listen on all addresses. It closes this one.
        store = dist.TCPStore(
            host,
            port,
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._store = host, port, store
        return store

    def receive(self, run: str, name: str, specs: Sequence[TensorSpec]) -> Mapping[str, Tensor]:
        """Take tensors that the run sends, into new ones; those that workers are to take come without data,
        on the device "meta"."""
        with self._lock:
            made, limit_s = self._group, self._limit_s
            if not self._name or self._run != run or self._name != name:
                raise Refusal(409, "this group is not open: another one has taken its place, or it failed")
        if made is None:
            return {spec.name: _empty(spec, torch.device("meta")) for spec in specs}
        # A run sends one bucket at a time; the lock keeps others from mixing theirs in.
        with self._receiving:
            try:
                group = made.result(timeout=limit_s)
                tensors = {spec.name: _empty(spec, group.device) for spec in specs}
                later(lambda: group.receive(list(tensors.values()))).result(timeout=limit_s)
            except (RuntimeError, TimeoutError) as error:
                self._drop(name)
                raise Refusal(503, f"the process group failed: {first_line(error)}") from error
        return tensors

    def _drop(self, name: str) -> None:
        with self._lock:
            if self._name == name:
                self._close(keeps=None if self._store is None else self._store[:2])

    def close_of(self, run: str) -> None:
        """Close what a run has opened, since it has ended."""
        with self._lock:
            if self._run == run:
                self._close(keeps=None)

    def _close(self, keeps: tuple[str, int] | None) -> None:
        made, self._group, self._run, self._name = self._group, None, "", ""
        if made is not None and made.done() and made.exception() is None:
            made.result().abort(CLOSING_S)
        if self._store is not None and self._store[:2] != keeps:
            # torch closes it with the last of its users.
            self._store = None


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def first_line(error: BaseException) -> str:
    """What torch says, without the place in its source."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text.rpartition("] ")[2][:200] if text.startswith("[") else text[:200] or type(error).__name__
