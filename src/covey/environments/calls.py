"""A call of users' code in this process: its outcome is told once, by its end or by its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from covey.exits import interrupt_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Returned:
    """Holds what a function returned."""

    value: Any
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Raised:
    """Holds what a function raised."""

    error: BaseException
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Late:
    """Says that a function had not returned at its time limit."""

    seconds: float


class Lock(Protocol):
    """Is held by a call while it runs; another thread may release it."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


Outcome = Returned | Raised | Late


class Loop:
    """Runs all that is async on one event loop in a thread of its own: clients belong to the loop that they
    were made in."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def submit(self, awaitable: Awaitable[Any]) -> Future[Any]:
        """Start a coroutine."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Return what a coroutine returns."""
        return self.submit(awaitable).result()

    def is_blocked(self, seconds: float) -> bool:
        """Return whether the loop starts nothing for so long: a function keeps it busy."""
        with contextlib.suppress(TimeoutError):
            self.submit(asyncio.sleep(0)).result(seconds)
            return False
        return True


class Call:
    """Calls a function and tells its outcome once. Its time begins when it has `lock`, which is free again
    when the outcome is told."""

    def __init__(
        self, limit_s: float, done: Callable[[Outcome], None], loop: Loop, lock: Lock | None = None
    ) -> None:
        self._limit_s = limit_s
        self._done = done
        self._loop = loop
        self._lock = lock
        self._future: Future[Any] | None = None
        self._outcome: Outcome | None = None
        self._guard = threading.Lock()
        self._began = 0.0
        self._timer: threading.Timer | None = None

    @property
    def is_late(self) -> bool:
        """Return whether the outcome is that the time is over."""
        return isinstance(self._outcome, Late)

    @property
    def is_on_loop(self) -> bool:
        """Return whether a coroutine was started."""
        return self._future is not None

    def run(self, function: Callable[[], Any]) -> None:
        """Call a function in this thread; a coroutine that it returns runs on the loop."""
        if self._lock is not None:
            self._lock.acquire()
        self._begin()
        try:
            value = function()
            if inspect.isawaitable(value):
                self._future = self._loop.submit(value)
                value = self._future.result()
            outcome: Outcome = Returned(value, self._seconds())
        except BaseException as error:  # noqa: BLE001 - it is somebody's code: what it raises is its result
            outcome = Raised(error, self._seconds())
        self._tell(outcome)

    def run_on_loop(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Start an async function on the loop."""
        self._begin()
        self._future = self._loop.submit(function())
        self._future.add_done_callback(self._end)

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._timer = threading.Timer(self._limit_s, self._end_late)
        self._timer.daemon = True
        self._timer.start()

    def _end(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._tell(Raised(asyncio.CancelledError(), self._seconds()))
            return
        error = future.exception()
        seconds = self._seconds()
        self._tell(Returned(future.result(), seconds) if error is None else Raised(error, seconds))

    def _end_late(self) -> None:
        self._tell(Late(self._limit_s))
        if self._future is not None:
            self._future.cancel()

    def _tell(self, outcome: Outcome) -> None:
        with self._guard:
            if self._outcome is not None:
                return
            self._outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
        if self._lock is not None:
            self._lock.release()
        self._done(outcome)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


class Lane:
    """Calls one function after the other in one thread. One that is late is interrupted, which ends a loop of
    Python's, and otherwise left alone in there; those behind it go on in a new thread."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tasks: queue.SimpleQueue[Callable[[int], bool] | None] = queue.SimpleQueue()
        self._start()

    def run(
        self,
        function: Callable[[], Any],
        limit_s: float,
        done: Callable[[Outcome], None],
        lock: Lock | None = None,
    ) -> None:
        """Call a function after all others; its time begins when it does, and when `lock` is free."""

        def work(thread: int) -> bool:
            """Make the call; return whether this thread can go on."""
            is_left = threading.Event()

            def tell(outcome: Outcome) -> None:
                if isinstance(outcome, Late):
                    if not call.is_on_loop:
                        interrupt_thread(thread)
                    is_left.set()
                    self._start()
                done(outcome)

            call = Call(limit_s, tell, self._loop, lock)
            call.run(function)
            # Another thread may get the number of this one when it has ended, and the interrupt with it.
            return not (call.is_late and is_left.wait())

        self._tasks.put(work)

    def end(self) -> None:
        """End the thread after what was asked for."""
        self._tasks.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            while (task := self._tasks.get()) is not None and task(threading.get_ident()):
                pass


class Pending(Generic[T]):
    """Gives each answer that is due once, at the latest when it is closed."""

    def __init__(self) -> None:
        self._due: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def add(self, done: Callable[[T], None], ended: T) -> Callable[[T], None]:
        """Return a function that tells `done` the answer; `ended` is the answer where it is closed before."""
        with self._lock:
            number = self._next
            self._next += 1
            is_closed = self._is_closed
            if not is_closed:
                self._due[number] = lambda: done(ended)
        if is_closed:
            done(ended)

        def tell(answer: T) -> None:
            with self._lock:
                is_due = self._due.pop(number, None) is not None
            if is_due:
                done(answer)

        return tell

    def close(self) -> None:
        """Answer all that is due, and what comes later at once."""
        with self._lock:
            self._is_closed = True
            due, self._due = list(self._due.values()), {}
        for tell in due:
            tell()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        # A task that calls sys.exit ends the loop, not the thread.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
