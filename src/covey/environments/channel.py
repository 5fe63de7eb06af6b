"""A worker process that is asked many things at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from covey.rewards.arguments import plain_value
from covey.rewards.process import WorkerGone, WorkerProcess
from covey.texts import tr, unpacked
from covey.types import Status

Answer = dict[str, Any] | WorkerGone


class Channel:
    """Sends requests to a worker that is ready for them; the answers come back in any order.

    The process watches its time limits itself. Where it ends, whatever is due is answered with how it did.
    """

    def __init__(self, worker: WorkerProcess, ended: Callable[[WorkerProcess], None]) -> None:
        self._worker = worker
        self._ended = ended
        self._due: dict[int, Callable[[Answer], None]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._end: WorkerGone | None = None

    @classmethod
    def over(cls, worker: WorkerProcess, ended: Callable[[WorkerProcess], None]) -> Channel:
        """Open a channel to a worker; `ended` is told when the worker has ended."""
        channel = cls(worker, ended)
        threading.Thread(target=channel._read, daemon=True).start()
        return channel

    @property
    def is_open(self) -> bool:
        """Return whether the process still answers."""
        return self._end is None and self._worker.is_running()

    def send(self, request: Mapping[str, Any], done: Callable[[Answer], None]) -> None:
        """Ask; `done` is told the answer by another thread, or at once where the process has ended."""
        with self._lock:
            end, number = self._end, self._next
            self._next += 1
            if end is None:
                self._due[number] = done
        if end is not None:
            done(end)
            return
        try:
            line = json.dumps({**request, "id": number}, default=plain_value)
        except (TypeError, ValueError, RecursionError) as error:
            with self._lock:
                is_due = self._due.pop(number, None) is not None
            if is_due:
                done(WorkerGone(Status.ERROR, tr("could not be sent: {error}", error=error)))
            return
        try:
            with self._write_lock:
                self._worker.send(line)
        except OSError:
            # A pipe that is closed: the thread that reads tells the end.
            self._worker.end_group()

    def end(self) -> None:
        """End the process; the thread that reads answers what is due."""
        self._worker.end_group()

    def _read(self) -> None:
        words: str | None = None
        while (line := self._worker.read_line()).endswith(b"\n"):
            try:
                answer = self._worker.read(line)
            except WorkerGone:
                break
            if "ending" in answer:
                words = unpacked(answer["ending"])
                continue
            with self._lock:
                done = self._due.pop(answer["id"], None)
            if done is not None:
                done(answer)
        gone = self._worker.gone()
        with self._lock:
            self._end = WorkerGone(Status.ERROR, words) if words else gone
            due, self._due = list(self._due.values()), {}
        self._ended(self._worker)
        for done in due:
            done(self._end)
