"""One tracker on a thread of its own, behind a queue that never makes the run wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from covey.telemetry.trackers.mute import muted
from covey.telemetry.trackers.protocol import Tracker
from covey.texts import tr

_QUEUE = 1000
_MAX_FAILURES = 3

Record = Callable[[Tracker], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a tracker was switched off."""

    error: str


class Worker:
    """Opens, feeds and closes one tracker on a daemon thread.

    What the thread has to say waits until the run asks for it with `take`, so the run's files and its
    terminal are only ever touched from the run's own thread.
    """

    def __init__(self, name: str, opener: Callable[[Callable[[str], None]], Tracker]) -> None:
        self.name = name
        self.num_lost = 0
        self._opener = opener
        self._queue: deque[Record] = deque()
        self._said: deque[str | Failure] = deque()
        self._changed = threading.Condition()
        self._exit_code: int | None = None
        self._ended = threading.Event()
        self._off = False
        self._num_failures = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread; the client is imported and opened there."""
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record; of a full queue the oldest is dropped and counted."""
        with self._changed:
            if self._off:
                return
            if len(self._queue) >= _QUEUE:
                self._queue.popleft()
                self.num_lost += 1
            self._queue.append(record)
            self._changed.notify()

    def take(self) -> Iterator[str | Failure]:
        """Yield what the thread has had to say since the last call."""
        while self._said:
            yield self._said.popleft()

    def finish(self, exit_code: int) -> None:
        """Ask the thread to send what is queued and close the client."""
        with self._changed:
            self._exit_code = exit_code
            self._changed.notify()

    @property
    def num_queued(self) -> int:
        """Records that the client has not got yet."""
        return len(self._queue)

    def has_ended(self, seconds: float) -> bool:
        """Wait for the thread for so long; return whether it has ended."""
        # Ctrl-C in Thread.join takes a thread that runs for one that has ended, up to Python 3.12.
        return self._ended.wait(seconds)

    def stop(self) -> bool:
        """Wait no longer; return whether the thread has ended. What is in the queue then counts as lost."""
        with self._changed:
            self._off = True
            self.num_lost += len(self._queue)
            self._queue.clear()
        return self._ended.is_set()

    def _work(self) -> None:
        try:
            with muted():
                self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        try:
            tracker = self._opener(self._said.append)
        except BaseException as error:  # noqa: BLE001 - a client may raise anything, SystemExit included
            self._switch_off(error)
            return
        while (record := self._next()) is not None:
            if not self._attempt(record, tracker):
                return
        exit_code = self._exit_code or 0
        self._attempt(lambda client: client.close(exit_code), tracker, last=True)

    def _next(self) -> Record | None:
        """Wait for a record; None means that the queue is empty and the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._exit_code is not None)
            return self._queue.popleft() if self._queue else None

    def _attempt(self, record: Record, tracker: Tracker, *, last: bool = False) -> bool:
        """Run one call; return whether the tracker is still on."""
        try:
            record(tracker)
        except Exception as error:  # noqa: BLE001 - a client may raise anything
            self._num_failures += 1
            if not last:
                with self._changed:
                    self.num_lost += 1
            if last or self._num_failures >= _MAX_FAILURES:
                self._switch_off(error)
                return False
        except BaseException as error:  # noqa: BLE001 - an exit asked for here ends the tracker, not the run
            self._switch_off(error)
            return False
        return True

    def _switch_off(self, error: BaseException) -> None:
        with self._changed:
            self._off = True
            self.num_lost += len(self._queue)
            self._queue.clear()
        reason = str(error).strip().splitlines()
        self._said.append(
            Failure(
                error=tr(
                    "{name}: {reason}",
                    name=type(error).__name__,
                    reason=reason[0] if reason else tr("no reason given"),
                )
            )
        )
