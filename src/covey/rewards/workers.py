"""Worker processes that have users' code loaded: started when there is work, replaced when they end."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from covey.rewards.process import WorkerGone, WorkerProcess
from covey.rewards.targets import Target
from covey.texts import joined, tr, unpacked
from covey.types import Status


class Workers:
    """Hands out workers that wait for work; each has run `opening` and loaded what is in `loaded`."""

    def __init__(
        self, start: Callable[[], WorkerProcess], opening: Mapping[str, Any], load_limit_s: float
    ) -> None:
        self.loaded: list[Mapping[str, Any]] = []
        self._start_process = start
        self._opening = opening
        self._load_limit_s = load_limit_s
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._running: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers of the workers."""
        with self._lock:
            return tuple(sorted(worker.pid for worker in self._running))

    def take(self) -> WorkerProcess:
        """Return a worker that waits for work, or a new one with everything loaded."""
        try:
            while not (worker := self._idle.get_nowait()).is_running():
                self.end(worker)
            return worker
        except queue.Empty:
            pass
        worker, opened = self.start()
        faults = list(opened["faults"])
        for what in self.loaded:
            reply = self.load(worker, what)
            faults.extend([reply["fault"]] if "fault" in reply else reply.get("unusable", ()))
        if faults:
            self.end(worker)
            words = joined("; ", [unpacked(fault["words"]) for fault in faults])
            raise WorkerGone(Status.ERROR, tr("could not be loaded in a new worker: {words}", words=words))
        return worker

    def give_back(self, worker: WorkerProcess) -> None:
        """Let a worker wait for work."""
        self._idle.put(worker)

    def start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        """Return a new worker with nothing loaded, and what it says of its start."""
        worker = self._start_process()
        with self._lock:
            self._running.add(worker)
            is_closed = self._is_closed
        if is_closed:
            self.end(worker)
            raise WorkerGone(Status.ERROR, tr("was not called, because the run is ending"))
        return worker, self._prepared(worker, {"do": "open", "path": sys.path, **self._opening})

    def load(self, worker: WorkerProcess, what: Mapping[str, Any]) -> dict[str, Any]:
        """Load what `load_request` says into a worker."""
        return self._prepared(worker, what)

    def ask(self, worker: WorkerProcess, request: str, limit_s: float) -> dict[str, Any]:
        """Return the answer of a worker, which is ended where it gives none."""
        try:
            return worker.ask(request, limit_s)
        except WorkerGone:
            self.end(worker)
            raise

    def end(self, worker: WorkerProcess) -> None:
        """End a worker."""
        worker.kill()
        self.forget(worker)

    def forget(self, worker: WorkerProcess) -> None:
        """Forget a worker that has ended."""
        with self._lock:
            self._running.discard(worker)

    def close(self) -> None:
        """End every worker, and those that are just starting."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for worker in running:
            self.end(worker)

    def _prepared(self, worker: WorkerProcess, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that readies a worker; WorkerGone where it failed at that."""
        text = json.dumps({**request, "limit_s": self._load_limit_s}, default=str)
        reply = self.ask(worker, text, self._load_limit_s)
        if "failed" in reply:
            self.end(worker)
            raise WorkerGone(Status.ERROR, tr("failed: {words}", words=unpacked(reply["failed"])))
        return reply


def load_request(target: Target, **more: Any) -> dict[str, Any]:
    """Return what asks a worker to load a function or class."""
    return {"do": "load", "target": asdict(target), **more}
