"""The worker processes of a set of rewards: started when there is work, replaced when they end."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from covey.rewards.callee import Reply, Wants, unpacked_reply
from covey.rewards.process import WorkerGone, WorkerProcess
from covey.rewards.protocol import TrainerState, unpacked_fault
from covey.rewards.targets import Target
from covey.texts import joined, tr
from covey.types import RewardFault, Status

T = TypeVar("T")
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A function that the workers have: its number, what it wants, and whether it is ms-swift's."""

    number: int
    wants: Wants
    is_orm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What a pool holds: how many workers at most, what they run at their start, and the time limits."""

    plugins: tuple[str, ...]
    options: Mapping[str, Any]
    workers: int
    timeout_s: float
    load_limit_s: float


class Pool:
    """Threads, each of which talks to one worker at a time.

    An async function has threads of its own: calls that wait for a service hold up no other function's.
    """

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan
        self._threads = ThreadPoolExecutor(plan.workers, "rewards")
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._running: set[WorkerProcess] = set()
        self._targets: list[Target] = []
        self._own_threads: dict[int, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers of the workers."""
        with self._lock:
            return tuple(sorted(worker.pid for worker in self._running))

    def run_plugins(self) -> tuple[tuple[str, ...], tuple[RewardFault, ...]]:
        """The names that the plugin files put into `orms`, and what is wrong with the files."""
        return awaited(self._threads.submit(self._run_plugins))

    def load(self, target: Target) -> Loaded | RewardFault:
        """Import a function; every worker started from now on imports it too."""
        return awaited(self._threads.submit(self._load, target))

    def call(
        self,
        number: int,
        arguments: Mapping[str, str],
        count: int,
        state: TrainerState,
        limit_s: float | None = None,
    ) -> Future[Reply]:
        """Call a loaded function; its arguments are JSON already. Where no limit is given, the plan's
        holds."""
        limit_s = self.plan.timeout_s if limit_s is None else limit_s
        what = {"do": "call", "reward": number, "count": count, "state": asdict(state)}
        head = json.dumps({**what, "limit_s": limit_s})
        fields = ", ".join(f"{json.dumps(name)}: {text}" for name, text in arguments.items())
        threads = self._own_threads.get(number, self._threads)
        return threads.submit(self._call, f'{head[:-1]}, "arguments": {{{fields}}}}}', limit_s)

    def close(self) -> None:
        """End every worker; a call in progress ends as failed."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for worker in running:
            self._end(worker)
        for threads in (self._threads, *self._own_threads.values()):
            threads.shutdown(cancel_futures=True)

    def _run_plugins(self) -> tuple[tuple[str, ...], tuple[RewardFault, ...]]:
        try:
            worker, opened = self._start()
        except WorkerGone as gone:
            entry = " ".join(self.plan.plugins)
            return (), (_without_end(entry, entry, gone),)
        self._idle.put(worker)
        return tuple(opened["orms"]), tuple(unpacked_fault(fault) for fault in opened["faults"])

    def _load(self, target: Target) -> Loaded | RewardFault:
        try:
            worker = self._take()
            reply = self._ask_to_load(worker, target)
        except WorkerGone as gone:
            return _without_end(target.entry, target.file or target.module or target.entry, gone)
        self._idle.put(worker)
        if "fault" in reply:
            return unpacked_fault(reply["fault"])
        self._targets.append(target)
        number = len(self._targets) - 1
        if reply["is_async"]:
            self._own_threads[number] = ThreadPoolExecutor(self.plan.workers, "async-reward")
        named = reply["wants"]
        wants = Wants(
            names=tuple(named["names"]), demands=tuple(named["demands"]), takes_all=named["takes_all"]
        )
        return Loaded(number=number, wants=wants, is_orm=reply["is_orm"])

    def _call(self, request: str, limit_s: float) -> Reply:
        try:
            worker = self._take()
            reply = self._ask(worker, request, limit_s)
        except WorkerGone as gone:
            return {"failed": str(gone), "status": gone.status.value}
        self._idle.put(worker)
        return unpacked_reply(reply)

    def _take(self) -> WorkerProcess:
        """A worker that waits for work, or a new one with every function loaded."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        worker, opened = self._start()
        faults = list(opened["faults"])
        for target in self._targets:
            reply = self._ask_to_load(worker, target)
            faults.extend([reply["fault"]] if "fault" in reply else [])
        if faults:
            self._end(worker)
            words = joined("; ", [unpacked_fault(fault).words for fault in faults])
            raise WorkerGone(Status.ERROR, tr("could not be loaded in a new worker: {words}", words=words))
        return worker

    def _start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        worker = WorkerProcess.start()
        with self._lock:
            self._running.add(worker)
            is_closed = self._is_closed
        if is_closed:
            self._end(worker)
            raise WorkerGone(Status.ERROR, tr("was not called, because the run is ending"))
        limit_s = self.plan.load_limit_s
        what = {"do": "open", "path": sys.path, "plugins": self.plan.plugins, "options": self.plan.options}
        return worker, self._prepared(worker, json.dumps({**what, "limit_s": limit_s}, default=str))

    def _ask_to_load(self, worker: WorkerProcess, target: Target) -> dict[str, Any]:
        limit_s = self.plan.load_limit_s
        what = {"do": "load", "target": asdict(target), "limit_s": limit_s}
        return self._prepared(worker, json.dumps(what))

    def _prepared(self, worker: WorkerProcess, request: str) -> dict[str, Any]:
        """The answer to a request that readies a worker; WorkerGone where it failed at that."""
        reply = self._ask(worker, request, self.plan.load_limit_s)
        if "failed" in reply:
            self._end(worker)
            raise WorkerGone(Status.ERROR, tr("failed: {words}", words=unpacked_reply(reply)["failed"]))
        return reply

    def _ask(self, worker: WorkerProcess, request: str, limit_s: float) -> dict[str, Any]:
        try:
            return worker.ask(request, limit_s)
        except WorkerGone:
            self._end(worker)
            raise

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._lock:
            self._running.discard(worker)


def _without_end(reward: str, what: str, gone: WorkerGone) -> RewardFault:
    words = tr("{what}: the import {gone}", what=what, gone=gone)
    return RewardFault(reward=reward, kind="import", words=words, subject=what)


def awaited(future: Future[T]) -> T:
    """The result of a future, while Ctrl-C is heard.

    A signal that comes just before a thread begins to wait without a limit is not heard until the wait ends.
    """
    while not wait([future], _LOOK_S).done:
        pass
    return future.result()


def chunks(groups: Sequence[int], parts: int) -> list[range]:
    """Cut rows into at most `parts` runs of whole groups, as even as that allows.

    `groups` names each row's group: `chunks([0, 0, 1, 1, 2, 2], 2)` is `[range(0, 4), range(4, 6)]`.
    """
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    parts = min(parts, len(starts))
    cuts = [starts[-(-len(starts) * part // parts)] for part in range(parts)]
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(groups)], strict=True)]
