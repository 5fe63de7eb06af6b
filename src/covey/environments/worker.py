"""The process that runs users' tools and environments: `python -m covey.environments.worker`.

As in `covey.rewards.worker` a request is a JSON line and so is its reply. Those without an `id` are answered
one after the other, in the main thread:

    {"do": "open", "path": […], "holds": "tools", "limits": {…}, "memory_gb": 2}
        {"faults": []}
    {"do": "load", "target": {…}, "needs_schema": true}
        {"is_async": false, "schema": {…}}, or {"unusable": [{"kind": "no_hints", …}]}
    {"do": "call", "tool": "calculate", "arguments": {…}, "limit_s": 2}
        {"result": {…}}

Those with an `id` are answered when they are done, with their `id`; {"ending": words} says why the process
ends itself.
"""

from __future__ import annotations

import faulthandler
import inspect
import resource
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from covey.environments.calls import Call, Late, Loop, Outcome, Raised, Returned
from covey.environments.environment_worker import EnvironmentWorker
from covey.environments.scheduler_worker import SchedulerWorker
from covey.environments.schema import BadArguments, Unusable, schema_of
from covey.environments.tool import (
    Limits,
    Tool,
    failed,
    packed_faults,
    packed_result,
    result_of,
    unloadable,
)
from covey.rewards.callee import describe
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.pipes import Pipes, end_group
from covey.rewards.targets import Target
from covey.texts import packed, tr
from covey.types import CallFailure

_ANSWERS_WITHIN_S = 1.0
_GRACE_S = 2.0
Send = Callable[[Mapping[str, Any]], None]


class ToolWorker:
    """Calls tools: sync ones for who waits for the answer, async ones beside each other."""

    def __init__(self, loader: Loader, limits: Limits, end: Callable[[str], None]) -> None:
        self._loader = loader
        self._limits = limits
        self._end = end
        self._tools: dict[str, Tool] = {}
        self._loop = Loop()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import a tool, or call a sync one."""
        return self._load(request) if request["do"] == "load" else self._call(request)

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        target = Target(**request["target"])
        try:
            function = self._loader.attribute(target)
            schema = schema_of(function) if request["needs_schema"] else None
            tool = Tool.of(function)
        except Unloadable as fault:
            return packed_faults([unloadable(fault)])
        except Unusable as error:
            return packed_faults([error.fault])
        self._tools[tool.name] = tool
        return {"is_async": tool.is_async, "schema": schema, "name": tool.name}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tool = self._tools[request["tool"]]
        began = time.monotonic()
        try:
            value = tool.function(**tool.signature.fit(request["arguments"]))
            if inspect.isawaitable(value):
                # A decorator hides that the function is async.
                value = self._loop.wait(value)
            outcome: Outcome = Returned(value, time.monotonic() - began)
        except BadArguments as error:
            return self._bad_arguments(tool, error)
        except BaseException as error:  # noqa: BLE001 - it is somebody's code: what it raises is its result
            outcome = Raised(error, time.monotonic() - began)
        return self._result(tool, outcome)

    def begin(self, request: Mapping[str, Any], send: Send) -> None:
        """Start an async tool."""
        tool = self._tools[request["tool"]]

        def tell(outcome: Outcome) -> None:
            send(self._result(tool, outcome))
            if isinstance(outcome, Late) and self._loop.is_blocked(_ANSWERS_WITHIN_S):
                self._end(tr("another call kept the event loop busy, so that their process was ended"))

        try:
            arguments = tool.signature.fit(request["arguments"])
        except BadArguments as error:
            send(self._bad_arguments(tool, error))
            return
        Call(self._limits.timeout_s, tell, self._loop).run_on_loop(partial(tool.function, **arguments))

    def _result(self, tool: Tool, outcome: Outcome) -> dict[str, Any]:
        return {"result": packed_result(result_of(tool.name, outcome, self._limits.max_result_chars))}

    def _bad_arguments(self, tool: Tool, error: BadArguments) -> dict[str, Any]:
        return {"result": packed_result(failed(tool.name, CallFailure.ARGUMENTS, str(error)))}


_Worker = ToolWorker | EnvironmentWorker | SchedulerWorker
_KINDS: Mapping[str, type[_Worker]] = {
    "tools": ToolWorker,
    "environments": EnvironmentWorker,
    "schedulers": SchedulerWorker,
}


def main() -> None:
    """Answer requests until the parent closes the pipe or is gone."""
    pipes = Pipes.take()
    requests = pipes.requests()
    opening = next(requests)
    made: list[_Worker] = []
    pipes.answer(opening, lambda request: _open(request, pipes, made))
    (worker,) = made
    is_watched = False
    for request in requests:
        if "id" not in request:
            pipes.answer(request, worker.answer)
            continue
        if not is_watched:
            is_watched = True
            threading.Thread(target=_watch, args=(opening["limits"]["timeout_s"],), daemon=True).start()
        send = partial(_send, pipes, request["id"])
        try:
            worker.begin(request, send)
        except Exception as error:  # noqa: BLE001 - a process that ends takes its words with it
            send({"failed": packed(describe(error, None))})


def _open(request: Mapping[str, Any], pipes: Pipes, made: list[_Worker]) -> dict[str, Any]:
    if request["memory_gb"] is not None:
        most = int(request["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    loader = Loader(request["path"], {})
    loader.open()
    kind = _KINDS[request["holds"]]
    made.append(kind(loader, Limits(**request["limits"]), partial(_end, pipes)))
    return {"faults": []}


def _send(pipes: Pipes, number: int, reply: Mapping[str, Any]) -> None:
    pipes.send({**reply, "id": number})


def _end(pipes: Pipes, words: str) -> None:
    pipes.send({"ending": packed(words)})
    end_group()


def _watch(limit_s: float) -> None:
    """End this process, and say where it is, when no Python thread runs for longer than a call may take: C
    code that keeps the interpreter's lock lets no thread watch the time. faulthandler's timer needs none."""
    while True:
        faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=2)
        time.sleep(_ANSWERS_WITHIN_S)


if __name__ == "__main__":
    main()
