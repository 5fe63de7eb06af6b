"""The process that runs users' reward functions: `python -m covey.rewards.worker`, started by a pool.

A request is one JSON line on standard input, its reply one JSON line on standard output; each request also
has its time limit, `limit_s`:

    {"do": "open", "path": […], "plugins": ["p.py"], "options": {…}}
        {"orms": ["name"], "faults": [{"reward": "p.py", "kind": "import", "words": …, …}]}
    {"do": "load", "target": {…}}
        {"wants": {…}, "is_orm": false, "is_async": false}, or {"fault": {"kind": "missing", …}}
    {"do": "call", "reward": 0, "count": 8, "state": {…}, "arguments": {…}}
        a `covey.rewards.callee.Reply`

What the functions print goes to standard error, and nothing of theirs reads the requests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from covey.rewards.callee import Callee, describe, packed_reply
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.protocol import TrainerState, packed_fault
from covey.rewards.targets import Target

# The parent ends a late worker; this much later one whose parent is gone ends itself.
_GRACE_S = 1.0


class Worker:
    """Answers requests; the functions it has loaded are numbered in the order of their loading."""

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._callees: list[Callee] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        match request["do"]:
            case "open":
                return self._open(request)
            case "load":
                return self._load(Target(**request["target"]))
            case _:
                callee = self._callees[request["reward"]]
                state = TrainerState(**request["state"])
                return packed_reply(callee.call(request["arguments"], request["count"], state))

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._loader = Loader(request["path"], request["options"])
        self._loader.open()
        faults = []
        for file in request["plugins"]:
            try:
                self._loader.run_plugin(file)
            except Unloadable as fault:
                faults.append(packed_fault(fault.of(file)))
        return {"orms": sorted(self._loader.orms()), "faults": faults}

    def _load(self, target: Target) -> dict[str, Any]:
        assert self._loader is not None
        try:
            callee, is_orm = self._loader.load(target)
        except Unloadable as fault:
            return {"fault": packed_fault(fault.of(target.entry))}
        self._callees.append(callee)
        return {"wants": asdict(callee.wants), "is_orm": is_orm, "is_async": callee.is_async}


def main() -> None:
    """Answer requests until the parent closes the pipe or is gone."""
    requests, replies = _take_pipes()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    worker, number = Worker(), os.getpid()
    while True:
        request = json.loads(lines.get())
        try:
            with _limit(request["limit_s"]):
                reply = worker.answer(request)
        except Exception as error:  # noqa: BLE001 - a worker that ends takes its words with it
            reply = packed_reply({"failed": describe(error, None), "status": "error"})
        if os.getpid() != number:
            # A function has forked, and this is the child: the answer is its parent's to give.
            os._exit(0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under numbers of their own, which child processes do not inherit; standard input is
    empty from here on and standard output is standard error."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    # A function inside C code, a pattern that backtracks for hours say, lets no Python thread see that the
    # pipe is closed; this timer needs none.
    with open(os.devnull, "w") as nothing:
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True, file=nothing)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _read(requests: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on; when the pipe ends, end this process and those that reward functions have started."""
    for line in requests:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
