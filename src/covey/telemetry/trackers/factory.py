"""Starts the trackers that a run reports to."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.telemetry.trackers.leave import leave_in_time
from covey.telemetry.trackers.protocol import Start, Tracker
from covey.telemetry.trackers.worker import Failure, Worker

# Of each tracker the package that it imports and the distribution that installs it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
NAMES = tuple(_PACKAGES)
_CLOSE_S = 5.0

Open = Callable[[Start], Tracker]


def missing(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (tracker, distribution to install) for each whose package is not there; imports none of them."""
    asked = [name for name in names if name != "none"]
    return [(n, _PACKAGES[n][1]) for n in asked if importlib.util.find_spec(_PACKAGES[n][0]) is None]


class Trackers:
    """All trackers of a run; no call waits for a client but `close`, and that for a few seconds."""

    def __init__(
        self, workers: Sequence[Worker], *, say: Callable[[str], None], event: Callable[..., None]
    ) -> None:
        self._workers = tuple(workers)
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

    def close(self, exit_code: int, *, seconds: float = _CLOSE_S) -> None:
        """Send what is queued and end the runs, within `seconds` in all; say what was lost.

        Where a client is stuck, the process ends with `exit_code` soon after its main thread does.
        """
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.finish(exit_code)
        deadline = time.monotonic() + seconds
        stuck = False
        for worker in self._workers:
            ended = worker.join(deadline - time.monotonic())
            stuck = stuck or not ended
            self._report(worker)
            if not ended:
                self._say(f"{worker.name} did not end within {seconds:g} s; what it had not sent may be lost")
            if worker.num_lost:
                self._say(f"{worker.name} lost {worker.num_lost} records; the run's own files hold them all")
        if stuck:
            leave_in_time(exit_code)

    def _put(self, record: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(record)
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        for said in worker.take():
            if isinstance(said, Failure):
                self._say(f"{worker.name} is switched off ({said.error}); the run goes on")
                self._event("tracker_failed", name=worker.name, error=said.error)
            else:
                self._say(said)


def start(
    names: Sequence[str],
    *,
    run_name: str | None,
    output_dir: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    event: Callable[..., None],
) -> Trackers:
    """Start the named trackers, each on its own thread, and return at once; "none" stands for no tracker.

    `say` and `event` are called from `log`, `table` and `close` only.

        trackers = start(["wandb"], run_name="gsm8k", output_dir=out, config=options, say=say, event=event)
        trackers.log(1, {"reward": 0.25, "kl": None})
        trackers.close(exit_code=0)
    """
    openers = {name: functools.partial(_open, name) for name in dict.fromkeys(names) if name != "none"}
    return start_with(openers, run_name=run_name, output_dir=output_dir, config=config, say=say, event=event)


def start_with(
    openers: Mapping[str, Open],
    *,
    run_name: str | None,
    output_dir: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    event: Callable[..., None],
) -> Trackers:
    """As `start`, with the functions that open the trackers."""
    options = dict(config)

    def worker(name: str, opener: Open) -> Worker:
        def opened(note: Callable[[str], None]) -> Tracker:
            return opener(Start(run_name=run_name, output_dir=output_dir, config=options, note=note))

        return Worker(name, opened)

    workers = [worker(name, opener) for name, opener in openers.items()]
    for one in workers:
        one.start()
    return Trackers(workers, say=say, event=event)


def _open(name: str, start: Start) -> Tracker:
    module = importlib.import_module(f"covey.telemetry.trackers.{name}")
    tracker: Tracker = module.open_tracker(start)
    return tracker
