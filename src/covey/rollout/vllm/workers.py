"""vLLM's workers where they are processes of their own, and the two ways in which weights get to them: files
in memory, or a process group with the run, of which each worker is a rank.

Through a group come tensors alone. What they are a worker reads in the store where the group meets: one note
for each tensor, in the order in which they are sent, and one behind the last that says how it ended.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from covey.rollout.engine import NamedWeights
from covey.rollout.server.group import (
    CLOSING_S,
    NCCL,
    Group,
    GroupPlace,
    connect_store,
    join_group,
    later,
)
from covey.rollout.vllm.files import memory_directory, write_weights
from covey.texts import tr

WHOLE, ENDED = "whole", "ended"
"""How the tensors of a publish ended."""
# How long a worker asks the store for a note before it asks again.
_ASK_S = 5.0


class Workers:
    """The workers of one vLLM; `call` calls a method in all of them and gives what each has returned. All of
    it is called from one thread."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self._store: dist.Store | None = None
        self._loading: Future[list[str]] | None = None
        self._num_loads = 0

    def devices(self) -> list[str]:
        """The device of each, as `device_name` says it."""
        return self._call("covey_device")

    def join(self, place: GroupPlace) -> None:
        """Be the ranks from 1 on of a group; ValueError where one of them could not."""
        if self._loading is not None:
            raise ValueError(
                tr("a process group is opened before the tensors of a publish, not between them")
            )
        self.leave()
        _raise_first(self._call("covey_join_group", args=(asdict(place), len(self.devices()))))
        store = connect_store(place.host, place.port, place.timeout_s)
        self._store = dist.PrefixStore(place.name, store)

    def leave(self) -> None:
        """Have every worker leave the group, if they are in one."""
        if self._store is not None:
            self._store = None
            self._call("covey_leave_group")

    def load(self, weights: NamedWeights) -> None:
        """Have the workers take the weights of a new version: those on the device "meta" from the group.
        ValueError where one of them could not."""
        first = next(weights, None)
        if first is None:
            return
        if first[1].is_meta:
            self._load_from_group(chain([first], weights))
            return
        with tempfile.TemporaryDirectory(prefix="covey-publish-", dir=memory_directory()) as directory:
            write_weights(chain([first], weights), Path(directory))
            self._call("covey_load_files", args=(directory,))

    def _load_from_group(self, weights: NamedWeights) -> None:
        store = self._store
        if store is None:
            raise ValueError(tr("the workers of this vLLM are in no process group"))
        number, self._num_loads = self._num_loads, self._num_loads + 1
        loading = self._loading = later(lambda: self._call("covey_load_group", args=(number,)))
        how, count = ENDED, 0
        try:
            for name, tensor in weights:
                if loading.done():
                    # One of them failed, and says how.
                    break
                store.set(_key(number, count), _note(name, tensor))
                count += 1
            else:
                how = WHOLE
        finally:
            # The workers read notes as long as the load lasts.
            store.set(_key(number, count), json.dumps(how))
            self._end_load(loading)
        for at in range(count + 1):
            store.delete_key(_key(number, at))
        _raise_first(loading.result())

    def _end_load(self, loading: Future[list[str]]) -> None:
        """Wait for the workers; a group of which one of them failed is of no use any more."""
        try:
            failed = any(loading.result())
        except BaseException:
            self._store = self._loading = None
            raise
        self._loading = None
        if failed:
            self.leave()


def _raise_first(failures: list[str]) -> None:
    for number, words in enumerate(failures):
        if words:
            raise ValueError(
                tr("worker {number} of vLLM did not take the weights: {words}", number=number, words=words)
            )


def _key(load: int, at: int) -> str:
    return f"{load}/{at}"


def _note(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return json.dumps({"name": name, "dtype": dtype, "shape": list(tensor.shape)})


class WorkerGroup:
    """One worker's part of a group."""

    def __init__(self, place: GroupPlace, rank: int, world: int, device: torch.device) -> None:
        """Join the group as `rank` of `world`. Raises RuntimeError or TimeoutError if another rank does not
        join within the place's `timeout_s` seconds."""
        self._limit_s = place.timeout_s
        where = device if place.backend == NCCL else torch.device("cpu")

        def join() -> tuple[dist.Store, Group]:
            store = connect_store(place.host, place.port, place.timeout_s)
            return store, join_group(
                store,
                place.name,
                rank,
                world,
                host=place.host,
                backend=place.backend,
                device=where,
                timeout_s=place.timeout_s,
            )

        store, self._group = later(join).result(timeout=place.timeout_s)
        self._store = dist.PrefixStore(place.name, store)

    def received(self, load: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one load as they come; RuntimeError or TimeoutError where the group fails,
        ValueError where nobody goes on with it."""
        group, at = self._group, 0
        while isinstance(note := self._read(_key(load, at)), dict):
            dtype = getattr(torch, note["dtype"])
            tensor = torch.empty(note["shape"], dtype=dtype, device=group.device)
            self._in_time(partial(group.receive, [tensor]))
            yield note["name"], tensor
            at += 1
        if note != WHOLE:
            raise ValueError(tr("the publish was ended"))
        self._in_time(group.finish)

    def _read(self, key: str) -> Any:
        """The note under a key, whenever it comes: the run may gather a tensor for long."""
        while True:
            try:
                self._store.wait([key], timedelta(seconds=_ASK_S))
            except dist.DistStoreError:
                continue
            return json.loads(self._store.get(key))

    def _in_time(self, call: Callable[[], None]) -> None:
        later(call).result(timeout=self._limit_s)

    def leave(self) -> None:
        """Leave the group and abort what still waits in it."""
        self._group.abort(CLOSING_S)
