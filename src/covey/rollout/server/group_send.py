"""A run's side of the process group with a server or its workers, which is made once and kept between
publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from covey.codes import CODES
from covey.rollout.server.bucket import Bucket
from covey.rollout.server.call import Caller, Refused
from covey.rollout.server.group import (
    DEVICES,
    GLOO,
    NCCL,
    RUN,
    SERVER,
    Group,
    GroupFailed,
    connect_store,
    device_name,
    first_line,
    join_group,
    later,
)
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import ServerStatus
from covey.texts import tr
from covey.types import Finding, Severity

# Seconds in which a server says why it ended a transfer.
_REASON_S = 1.0


@dataclass(slots=True)
class GroupSender:
    """Sends to the server of `caller`, which is to wait for the run at `port`. `refused` says why the weights
    go another way, where they do."""

    caller: Caller
    port: int
    refused: str = ""
    _group: Group | None = None
    _name: str = ""
    # The process of the server that the group is with, and the publish for which it was asked.
    _instance: str = ""
    _asked_for: str = ""
    _told: set[str] = field(default_factory=set)

    def is_open(self, status: ServerStatus, transfer: str, bucket: Bucket) -> bool:
        """Whether the tensors of a publish go through a group, which is made where there is none. A server
        that refuses one is asked again at the next publish.

        Raises one of FAULTS where it accepts, and the group does not come about in time.
        """
        if self._group is not None and self._instance != status.instance:
            self.close()
        if self._group is None and self._asked_for != transfer:
            self._asked_for, self.refused = transfer, ""
            try:
                self._open(status, transfer, bucket.device)
            except Refused as error:
                self.refused = str(error)
        return self._group is not None

    def _open(self, status: ServerStatus, transfer: str, device: torch.device) -> None:
        if not status.group_device:
            self.refused = tr("it does not support a process group")
            return
        both_gpus = device.type == "cuda" and status.group_device != "cpu"
        if both_gpus and device_name(device) in status.group_device.split(DEVICES):
            self.refused = tr(
                "it uses the GPU of the training process, and NCCL does not support two processes on one GPU"
            )
            return
        backend = NCCL if both_gpus and dist.is_nccl_available() else GLOO
        limit = self.caller.timeout_s
        body = {"transfer": transfer, "port": self.port, "backend": backend, "timeout_s": limit}
        with self.caller.open("POST", "/v1/publish/group", body) as answer:
            here, there = answer.hosts
            found = answer.json()
        name = found.get("group") if isinstance(found, dict) else None
        if not isinstance(name, str):
            raise WireError(tr("its answer has group {name!r:.60}", name=name))
        world = found.get("world")
        if type(world) is not int or world <= SERVER:
            raise WireError(tr("its answer has {name} {value!r:.60}", name="world", value=world))

        def join() -> Group:
            store = connect_store(there, self.port, limit)
            where = device if backend == NCCL else torch.device("cpu")
            return join_group(
                store, name, RUN, world, host=here, backend=backend, device=where, timeout_s=limit
            )

        try:
            self._group = later(join).result(timeout=limit)
        except (RuntimeError, TimeoutError) as error:
            said = first_line(error) or tr("no answer within {limit:g} s", limit=limit)
            raise GroupFailed(
                tr(
                    "the process group with it at {there}, port {port}, could not be started: {said}",
                    there=there,
                    port=self.port,
                    said=said,
                )
            ) from error
        self._name, self._instance = name, status.instance

    def give(self, transfer: str, bucket: Bucket) -> None:
        """Send tensors of a publish; GroupFailed, or one of FAULTS, where the server does not take them."""
        group = self._group
        assert group is not None
        tensors = bucket.tensors if group.backend == NCCL else bucket.on_cpu
        body = {"transfer": transfer, "group": self._name, "tensors": _specs(tensors)}
        taken = later(lambda: self.caller.post("/v1/publish/group_tensors", body))
        sent = later(lambda: group.send(list(tensors.values())))
        limit = self.caller.timeout_s
        done, waiting = wait((taken, sent), limit, FIRST_EXCEPTION)
        if not waiting and all(one.exception() is None for one in done):
            return
        self.close()
        # Why the server ended it says more than that the group broke.
        wait((taken,), _REASON_S)
        if taken.done() and (error := taken.exception()) is not None:
            raise error
        if sent.done() and (error := sent.exception()) is not None:
            raise GroupFailed(
                tr("the process group with it failed: {first_line}", first_line=first_line(error))
            ) from error
        raise TimeoutError(tr("it did not receive its tensors within {limit:g} s", limit=limit))

    def close(self, patience_s: float = 0.0) -> None:
        """End the group, which is waited for so long; the next publish makes another."""
        if self._group is not None:
            self._group.abort(patience_s)
        self._group = None

    def take_notices(self, step: int) -> list[Finding]:
        """That weights go another way, once for each reason."""
        if not self.refused or self.refused in self._told:
            return []
        self._told.add(self.refused)
        seen = tr(
            "{address} gets the weights without a process group: {refused}",
            address=self.caller.address,
            refused=self.refused,
        )
        why = CODES["W183"].why
        return [Finding(code="W183", seen=seen, why=why, cause="", severity=Severity.WARNING, step=step)]


def _specs(tensors: Mapping[str, Tensor]) -> Sequence[Mapping[str, object]]:
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    ]
