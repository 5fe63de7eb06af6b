"""The process that runs users' tools and environments: `python -m covey.environments.worker`.

As in `covey.rewards.worker` a request is a JSON line and so is its reply. Those without an `id` are answered
one after the other, in the main thread:

    {"do": "open", "path": […], "holds": "tools", "limits": {…}, "memory_gb": 2}
        {"faults": []}
    {"do": "load", "target": {…}, "needs_schema": true}
        {"is_async": false, "schema": {…}}, or {"fault": {"kind": "no_hints", …}}
    {"do": "call", "tool": "calculate", "arguments": {…}, "limit_s": 2}
        {"result": {…}}

Those with an `id` are answered when they are done, with their `id`; {"ending": words} says why the process
ends itself.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from covey.environments.calls import Call, Late, Loop, Outcome, Raised, Returned
from covey.environments.schema import BadArguments, Unusable, schema_of
from covey.environments.tool import Limits, Tool, failed, packed_result, result_of
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.pipes import Pipes, end_group
from covey.rewards.protocol import packed_fault
from covey.rewards.targets import Target
from covey.texts import packed, tr
from covey.types import CallFailure

_ANSWERS_WITHIN_S = 1.0
_GRACE_S = 5.0
Send = Callable[[Mapping[str, Any]], None]


class ToolWorker:
    """Calls tools: sync ones for who waits for the answer, async ones beside each other."""

    def __init__(self, loader: Loader, limits: Limits, end: Callable[[str], None]) -> None:
        self._loader = loader
        self._limits = limits
        self._end = end
        self._tools: dict[str, Tool] = {}
        self._loop = Loop()

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import a tool."""
        target = Target(**request["target"])
        try:
            function = self._loader.attribute(target)
            schema = schema_of(function) if request["needs_schema"] else None
            tool = Tool.of(function)
        except Unloadable as fault:
            return {"fault": packed_fault(fault.of(target.entry))}
        except Unusable as error:
            return {"unusable": {**asdict(error.fault), "words": packed(error.fault.words)}}
        self._tools[tool.name] = tool
        return {"is_async": tool.is_async, "schema": schema, "name": tool.name}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call a sync tool."""
        tool = self._tools[request["tool"]]
        began = time.monotonic()
        try:
            value = tool.function(**tool.signature.fit(request["arguments"]))
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


def main() -> None:
    """Answer requests until the parent closes the pipe or is gone."""
    pipes = Pipes.take()
    requests = pipes.requests()
    opening = next(requests)
    made: list[ToolWorker] = []
    pipes.answer(opening, lambda request: _open(request, pipes, made))
    (worker,) = made
    is_watched = False
    for request in requests:
        if "id" not in request:
            pipes.answer(request, worker.load if request["do"] == "load" else worker.answer)
            continue
        if not is_watched:
            is_watched = True
            threading.Thread(target=_watch, args=(opening["limits"]["timeout_s"],), daemon=True).start()
        worker.begin(request, partial(_send, pipes, request["id"]))


def _open(request: Mapping[str, Any], pipes: Pipes, made: list[ToolWorker]) -> dict[str, Any]:
    if request["memory_gb"] is not None:
        most = int(request["memory_gb"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    loader = Loader(request["path"], {})
    loader.open()
    made.append(ToolWorker(loader, Limits(**request["limits"]), partial(_end, pipes)))
    return {"faults": []}


def _send(pipes: Pipes, number: int, reply: Mapping[str, Any]) -> None:
    pipes.send({**reply, "id": number})


def _end(pipes: Pipes, words: str) -> None:
    pipes.send({"ending": packed(words)})
    end_group()


def _watch(limit_s: float) -> None:
    """End this process where no Python thread runs for longer than a call may take: C code that keeps the
    interpreter's lock lets no thread watch the time. The timer of faulthandler needs no such thread."""
    with open(os.devnull, "w") as nothing:
        while True:
            faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=nothing)
            time.sleep(_ANSWERS_WITHIN_S)


if __name__ == "__main__":
    main()
