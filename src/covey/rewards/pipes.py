"""In a worker: the two pipes to its parent, and how requests are answered one after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from covey.rewards.callee import describe, packed_reply

# The parent ends a late worker; this much later one whose parent is gone ends itself.
_GRACE_S = 1.0


class Pipes:
    """Reads requests and writes replies, a JSON line each. No code of users reads the requests, and a child
    process can neither read nor answer them."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests, self._replies = requests, replies
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._number = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def take(cls) -> Pipes:
        """Take the two pipes under numbers of their own, which child processes do not inherit; standard input
        is empty from here on and standard output is standard error."""
        requests, replies = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        # A fork that lives on in a session of its own would otherwise hold the pipes open.
        os.register_at_fork(after_in_child=partial(_close, requests, replies))
        pipes = cls(os.fdopen(requests, "rb"), os.fdopen(replies, "wb"))
        threading.Thread(target=pipes._read, daemon=True).start()
        return pipes

    def requests(self) -> Iterator[dict[str, Any]]:
        """Return each request as it comes; when the parent closes the pipe or is gone, this process ends."""
        while True:
            yield json.loads(self._lines.get())

    def send(self, reply: Mapping[str, Any]) -> None:
        """Write a reply, from any thread."""
        if os.getpid() != self._number:
            # A function has forked, and this is the child: the answer is its parent's to give.
            os._exit(0)
        line = json.dumps(reply).encode() + b"\n"
        with self._lock:
            self._replies.write(line)
            self._replies.flush()

    def answer(
        self, request: Mapping[str, Any], how: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Answer a request that has a time limit."""
        try:
            with _limit(request["limit_s"]):
                reply = how(request)
        except Exception as error:  # noqa: BLE001 - a worker that ends takes its words with it
            reply = packed_reply({"failed": describe(error, None), "status": "error"})
        self.send(reply)

    def _read(self) -> None:
        """Pass lines on; when the pipe ends, end this process and those that functions have started."""
        for line in self._requests:
            self._lines.put(line)
        end_group()


def end_group() -> None:
    """End this worker and the processes that functions have started in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _close(*numbers: int) -> None:
    for number in numbers:
        os.close(number)


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
