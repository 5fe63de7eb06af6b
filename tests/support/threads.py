"""Ranks as threads of one process, for what is said between them and written to the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from covey.activity import Activity


class ThreadComm:
    """One of several ranks; JSON and maxima are exchanged."""

    first_rank = 0

    def __init__(self, rank: int, world: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world, self.activity = rank, world, Activity()
        self._shared, self._barrier = shared, barrier

    def gather_json(self, value: Any) -> list[Any]:
        self._shared[self.rank] = json.dumps(value)
        self._barrier.wait()
        values = [json.loads(text) for text in self._shared]
        self._barrier.wait()
        return values

    def max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self.gather_json(list(values)), strict=True)]


def on_ranks(world: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns on each rank, or raises: then the exception itself."""
    shared: list[Any] = [None] * world
    results: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=60)

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, world, shared, barrier))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
