"""The worker processes of a set of rewards, and the threads that talk to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from covey.rewards.callee import Reply, Wants, unpacked_reply
from covey.rewards.process import WorkerGone, WorkerProcess
from covey.rewards.protocol import TrainerState, unpacked_fault
from covey.rewards.targets import Target
from covey.rewards.workers import Workers, load_request
from covey.texts import tr
from covey.types import RewardFault

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
        opening = {"plugins": plan.plugins, "options": plan.options}
        self._workers = Workers(WorkerProcess.start, opening, plan.load_limit_s)
        self._own_threads: dict[int, ThreadPoolExecutor] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers of the workers."""
        return self._workers.pids

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
        self._workers.close()
        for threads in (self._threads, *self._own_threads.values()):
            threads.shutdown(cancel_futures=True)

    def _run_plugins(self) -> tuple[tuple[str, ...], tuple[RewardFault, ...]]:
        try:
            worker, opened = self._workers.start()
        except WorkerGone as gone:
            entry = " ".join(self.plan.plugins)
            return (), (_without_end(entry, entry, gone),)
        self._workers.give_back(worker)
        return tuple(opened["orms"]), tuple(unpacked_fault(fault) for fault in opened["faults"])

    def _load(self, target: Target) -> Loaded | RewardFault:
        try:
            worker = self._workers.take()
            reply = self._workers.load(worker, load_request(target))
        except WorkerGone as gone:
            return _without_end(target.entry, target.file or target.module or target.entry, gone)
        self._workers.give_back(worker)
        if "fault" in reply:
            return unpacked_fault(reply["fault"])
        self._workers.loaded.append(load_request(target))
        number = len(self._workers.loaded) - 1
        if reply["is_async"]:
            self._own_threads[number] = ThreadPoolExecutor(self.plan.workers, "async-reward")
        named = reply["wants"]
        wants = Wants(
            names=tuple(named["names"]), demands=tuple(named["demands"]), takes_all=named["takes_all"]
        )
        return Loaded(number=number, wants=wants, is_orm=reply["is_orm"])

    def _call(self, request: str, limit_s: float) -> Reply:
        try:
            worker = self._workers.take()
            reply = self._workers.ask(worker, request, limit_s)
        except WorkerGone as gone:
            return {"failed": str(gone), "status": gone.status.value}
        self._workers.give_back(worker)
        return unpacked_reply(reply)


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
