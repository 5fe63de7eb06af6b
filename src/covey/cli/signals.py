"""SIGTERM and Ctrl-C while a command starts, wherever its main thread is.

Python runs a signal's handler in the main thread, between two of its own instructions. A main thread that
waits inside a library, for the other ranks or for a file, comes to none, so a thread of its own ends the
process then. A run in training puts its own handlers in place, and this thread leaves their signals alone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from covey.exits import leave_early
from covey.meeting import meeting

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit code of each signal that ends a command."""

# How long a main thread in which no handler has run is waited for, and one that cleans up after its handler.
_NO_HANDLER_S, _CLEANUP_S = 1.0, 5.0
_POLL_S = 0.05


class Terminated(BaseException):
    """SIGTERM while nothing handles it better."""


class _SignalHandlers:
    """The handlers of both signals, and the thread that ends the process where they cannot."""

    def __init__(self) -> None:
        self._handler_ran = threading.Event()
        self._over = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._terminate}
        self._before = {n: signal.getsignal(n) for n in self._handlers}
        if self._before[signal.SIGINT] is not signal.default_int_handler:
            # Somebody else's, or ignored, as in a process that a shell has put into the background.
            del self._handlers[signal.SIGINT]

    def open(self) -> None:
        """Put handlers and thread in place."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch_signals, name="covey-signals", daemon=True).start()

    def close(self) -> None:
        """Put back what was there before."""
        self._over.set()
        signal.set_wakeup_fd(self._fd_before)
        for number in self._handlers:
            signal.signal(number, self._before[number])
        self._writer.close()

    def _terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        self._handler_ran.set()
        raise Terminated

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self._handler_ran.set()
        raise KeyboardInterrupt

    def _watch_signals(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(64):
                for number in numbers:
                    handler = self._handlers.get(signal.Signals(number))
                    # During training the handlers are those of the run.
                    if handler is not None and signal.getsignal(number) == handler:
                        self._end_after_wait(CODES[signal.Signals(number)])

    def _end_after_wait(self, code: int) -> None:
        """End the process unless it ends by itself."""
        asked = time.monotonic()
        while not self._over.wait(_POLL_S):
            # torchrun tells every rank to end as soon as one of them is gone, and why is to be said first.
            is_busy = self._handler_ran.is_set() or _a_rank_is_gone()
            if time.monotonic() - asked > (_CLEANUP_S if is_busy else _NO_HANDLER_S):
                os._exit(leave_early(code))


def _a_rank_is_gone() -> bool:
    place = meeting()
    return place is not None and any(place.state(rank) == "gone" for rank in place.others)


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Within it SIGTERM raises Terminated and Ctrl-C KeyboardInterrupt, and where the main thread does not
    come to that within a second the process ends with the signal's exit code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _SignalHandlers()
    handlers.open()
    try:
        yield
    finally:
        handlers.close()
