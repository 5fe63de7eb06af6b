"""Tools in worker processes: a call that is late, or takes too much memory, ends its worker and no more."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from covey.environments.calls import Pending
from covey.environments.channel import Answer, Channel
from covey.environments.printed import Printed
from covey.environments.protocol import Schema, ToolFault
from covey.environments.tool import Limits, failed, faults_of, unpacked_result
from covey.rewards.process import WorkerGone
from covey.rewards.targets import Target
from covey.rewards.workers import Workers, load_request
from covey.texts import tr, unpacked
from covey.types import CallFailure, Status, ToolCall, ToolResult

_AT_A_TIME = 64
Tell = Callable[[ToolResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTool:
    """Describes a tool that the workers have."""

    schema: Schema
    is_async: bool


class ToolPool:
    """Runs sync tools one at a time in each of up to `num_workers` processes, and up to 64 async ones at a
    time in one more."""

    def __init__(self, workers: Workers, num_workers: int, limits: Limits) -> None:
        self._workers = workers
        self._limits = limits
        self._tools: dict[str, LoadedTool] = {}
        self._pending: Pending[ToolResult] = Pending()
        self._threads = ThreadPoolExecutor(num_workers, "tools")
        self._async_thread = ThreadPoolExecutor(1, "async-tools")
        self._places = threading.Semaphore(_AT_A_TIME)
        self._channel: Channel | None = None

    @classmethod
    def of(cls, num_workers: int, limits: Limits, memory_gb: float | None, load_limit_s: float) -> ToolPool:
        """Return a pool without tools, of which no process runs yet."""
        opening = {"holds": "tools", "limits": asdict(limits), "memory_gb": memory_gb}
        return cls(Workers(Printed().start_worker, opening, load_limit_s), num_workers, limits)

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """The tools by name."""
        return {name: tool.schema for name, tool in self._tools.items()}

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers of the workers."""
        return self._workers.pids

    def load(self, target: Target) -> str | ToolFault:
        """Import a tool, whose name is returned; every worker started from now on imports it too."""
        try:
            worker = self._workers.take()
            reply = self._workers.load(worker, load_request(target, needs_schema=True))
        except WorkerGone as gone:
            words = tr("{what}: the import {gone}", what=target.entry, gone=gone)
            return ToolFault(entry=target.entry, kind="import", words=words)
        self._workers.give_back(worker)
        if "name" not in reply:
            return faults_of(target.entry, reply)[0]
        name = reply["name"]
        if name not in self._tools:
            self._workers.loaded.append(load_request(target, needs_schema=False))
            self._tools[name] = LoadedTool(schema=reply["schema"], is_async=reply["is_async"])
        return str(name)

    def call(self, call: ToolCall, done: Tell) -> None:
        """Start a call."""
        ending = failed(call.name, CallFailure.ENDED, "it was not finished, because the run is ending")
        tell = self._pending.add(done, ending)
        is_async = self._tools[call.name].is_async
        threads: Executor = self._async_thread if is_async else self._threads
        try:
            threads.submit(self._begin_async if is_async else self._call, call, tell)
        except RuntimeError:
            # The threads are closed, and so is what is pending.
            tell(ending)

    def close(self) -> None:
        """End all workers; calls that run end as failed."""
        self._pending.close()
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)
        self._async_thread.shutdown(wait=False, cancel_futures=True)
        self._places.release()

    def _call(self, call: ToolCall, tell: Tell) -> None:
        limit_s = self._limits.timeout_s
        try:
            request = json.dumps({**_request(call), "limit_s": limit_s})
        except (TypeError, ValueError, RecursionError) as error:
            tell(
                failed(call.name, CallFailure.ARGUMENTS, f"{call.name}(): its arguments are no JSON: {error}")
            )
            return
        try:
            worker = self._workers.take()
            reply = self._workers.ask(worker, request, limit_s)
        except WorkerGone as gone:
            tell(_ended(call.name, gone, limit_s))
            return
        self._workers.give_back(worker)
        tell(_result(call.name, reply))

    def _begin_async(self, call: ToolCall, tell: Tell) -> None:
        self._places.acquire()

        def answered(answer: Answer) -> None:
            self._places.release()
            tell(_ended(call.name, answer) if isinstance(answer, WorkerGone) else _result(call.name, answer))

        try:
            if self._channel is None or not self._channel.is_open:
                self._channel = Channel.over(self._workers.take(), self._workers.forget)
        except WorkerGone as gone:
            answered(gone)
            return
        self._channel.send(_request(call), answered)


def repeated_names(entries: Sequence[str], names: Sequence[str]) -> list[ToolFault]:
    """Return a fault for each tool whose name an earlier one has."""
    return [
        ToolFault(entry=entry, kind="signature", words=tr("another tool has the name {name}, too", name=name))
        for i, (entry, name) in enumerate(zip(entries, names, strict=True))
        if name in names[:i]
    ]


def _request(call: ToolCall) -> dict[str, Any]:
    return {"do": "call", "tool": call.name, "arguments": dict(call.arguments)}


def _result(name: str, reply: Mapping[str, Any]) -> ToolResult:
    if "result" in reply:
        return unpacked_result(reply["result"])
    return failed(name, CallFailure.ENDED, f"{name}() failed: {unpacked(reply['failed'])}")


def _ended(name: str, gone: WorkerGone, limit_s: float = 0.0) -> ToolResult:
    if gone.status is Status.TIMEOUT:
        return failed(name, CallFailure.TIMEOUT, f"{name}() {gone}", limit_s)
    return failed(name, CallFailure.ENDED, f"{name}(): {gone}")
