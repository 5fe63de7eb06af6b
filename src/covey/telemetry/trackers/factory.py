"""Starts the trackers that a run reports to."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.telemetry.trackers.protocol import Start, Tracker
from covey.telemetry.trackers.worker import Failure, Worker
from covey.texts import tr

_GRACE_S = 3.0

# Of each tracker the package that it imports and the distribution that installs it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
PATIENCE_S = 600.0
"""How long trackers that send nothing are waited for at the end of a run."""
_POLL_S = 0.2
_FIRST_WORD_S, _NEXT_WORD_S = 3.0, 30.0

Open = Callable[[Start], Tracker]


def missing(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (tracker, distribution to install) for each whose package is not there; imports none of them."""
    asked = [name for name in names if name != "none"]
    return [(n, _PACKAGES[n][1]) for n in asked if importlib.util.find_spec(_PACKAGES[n][0]) is None]


class Trackers:
    """All trackers of a run; no call waits for a client but `close`."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        say: Callable[[str], None],
        event: Callable[..., None],
        may_exit: bool,
    ) -> None:
        self._workers = tuple(workers)
        self._may_exit = may_exit
        self._say = say
        self._event = event
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Queue the metrics of an optimizer step for every tracker; those without a value are left out."""
        values = {name: value for name, value in metrics.items() if value is not None}
        self._put(lambda tracker: tracker.log(step, values))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue a table for every tracker; no rows, no table."""
        if copies := [dict(row) for row in rows]:
            self._put(lambda tracker: tracker.table(step, name, copies))

    def close(
        self, exit_code: int, *, patience_s: float = PATIENCE_S, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Send what is queued and end the runs, however long that takes; say what is waited for, and what was
        lost.

        Ctrl-C ends the waiting, and so do `patience_s` in which nothing was sent; a command's process then
        ends with `exit_code` soon after its main thread does. `progress` is called while it waits.
        """
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.finish(exit_code)
        try:
            if not self._wait(patience_s, progress):
                self._say(
                    tr(
                        "nothing was sent for {patience_s:g} s; covey no longer waits for the trackers",
                        patience_s=patience_s,
                    )
                )
        except KeyboardInterrupt:
            self._say(tr("interrupted; covey no longer waits for the trackers"))
        finally:
            self._give_up(exit_code)

    def _wait(self, patience_s: float, progress: Callable[[], None]) -> bool:
        """Wait until every tracker has ended; False where nothing was sent for `patience_s`."""
        sent_at = time.monotonic()
        say_at, num_left = sent_at + _FIRST_WORD_S, self._num_left()
        while waiting := [worker for worker in self._workers if not worker.has_ended(_POLL_S)]:
            progress()
            now = time.monotonic()
            if (left := self._num_left()) != num_left:
                sent_at, num_left = now, left
            if now - sent_at > patience_s:
                return False
            if now >= say_at:
                names = ", ".join(worker.name for worker in waiting)
                self._say(
                    tr(
                        "waiting for {names} to send {left} records; Ctrl-C stops waiting",
                        names=names,
                        left=left or tr("the last"),
                    )
                )
                say_at = now + _NEXT_WORD_S
        return True

    def _num_left(self) -> int:
        return sum(worker.num_queued for worker in self._workers)

    def _give_up(self, exit_code: int) -> None:
        """Say what was lost, and see to it that no client that has not ended keeps this process."""
        ended = [worker.stop() for worker in self._workers]
        for worker, has_ended in zip(self._workers, ended, strict=True):
            self._report(worker)
            if not has_ended:
                self._say(
                    tr("{name} had not finished; records that it had not sent may be lost", name=worker.name)
                )
            if worker.num_lost:
                self._say(
                    tr(
                        "{name} lost {num_lost} records; the files of the run have all of them",
                        name=worker.name,
                        num_lost=worker.num_lost,
                    )
                )
        if not all(ended) and self._may_exit:
            leave_in_time(exit_code)

    def _put(self, record: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(record)
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        for said in worker.take():
            if isinstance(said, Failure):
                self._say(
                    tr(
                        "{name} is switched off ({error}); the run continues",
                        name=worker.name,
                        error=said.error,
                    )
                )
                self._event("tracker_failed", name=worker.name, error=said.error)
            else:
                self._say(said)


def start(
    names: Sequence[str] | Mapping[str, Open],
    *,
    run_name: str | None,
    output_dir: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    event: Callable[..., None],
    may_exit: bool,
) -> Trackers:
    """Start the named trackers, each on its own thread, and return at once; "none" stands for no tracker.

    `names` may come with the functions that open them. `say` and `event` are called from `log`, `table` and
    `close` only. `may_exit`: the process is a command's, and ends though a client is stuck.

        trackers = start(
            ["wandb"], run_name="a", output_dir=out, config=options, say=say, event=event, may_exit=False
        )
        trackers.log(1, {"reward": 0.25, "kl": None})
        trackers.close(exit_code=0)
    """
    openers: Mapping[str, Open] = (
        names if isinstance(names, Mapping) else {n: functools.partial(_open, n) for n in names}
    )
    options = dict(config)

    def worker(name: str, opener: Open) -> Worker:
        def opened(note: Callable[[str], None]) -> Tracker:
            return opener(Start(run_name=run_name, output_dir=output_dir, config=options, note=note))

        return Worker(name, opened)

    workers = [worker(name, opener) for name, opener in openers.items() if name != "none"]
    for one in workers:
        one.start()
    return Trackers(workers, say=say, event=event, may_exit=may_exit)


def _open(name: str, start: Start) -> Tracker:
    module = importlib.import_module(f"covey.telemetry.trackers.{name}")
    tracker: Tracker = module.open_tracker(start)
    return tracker


def leave_in_time(exit_code: int) -> None:
    """See to it that this process, once its main thread is done, ends within a few seconds.

    A client's own exit handlers and threads may wait for a service that never answers; then the process ends
    with `exit_code` without them. One that ends by itself in time is left alone.
    """
    threading.Thread(target=_leave, args=(exit_code,), name="tracker-exit", daemon=True).start()


def _leave(exit_code: int) -> None:
    # The main thread counts as done before the interpreter waits for threads and runs exit handlers.
    threading.main_thread().join()
    time.sleep(_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)
