"""What the main thread of a process is doing: it says so in passing, and a watching thread reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from covey.texts import joined, plural, tr

PHASES = ("start", "rollout", "reward", "annotate", "update", "publish", "evaluate", "save")
"""What a main thread does, in the order of a run."""

_NAMED = 6

EXCLUDED = 2
"""Visits of a phase that say nothing of the later ones: kernels are compiled, caches are filled."""


def ranks_word(ranks: Sequence[int]) -> str:
    """`ranks_word([0, 2, 3, 4])` is "ranks 0, 2-4"; of many that are spread some are named."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if len(parts) > _NAMED + 1:
        rest = sum(len(run) for run in runs[_NAMED:])
        parts = [*parts[:_NAMED], tr("and {rest} more", rest=rest)]
    return plural(len(ranks), "rank {ranks}", "ranks {ranks}", ranks=joined(", ", parts))


def moment_words(phase: str, step: int, micro: int = 0, num_micro: int = 0) -> str:
    """`update, micro-batch 2 of 4, after step 12`; of what is before the first rollout `start-up`."""
    if phase == "start":
        return "start-up"
    return tr(
        "{phase}{words}, after step {step}",
        phase=phase,
        words=tr(", micro-batch {micro} of {num_micro}", micro=micro, num_micro=num_micro) if micro else "",
        step=step,
    )


class Stopped(BaseException):
    """A signal ended what can be thrown away and done again, such as a rollout; no error, so that nothing
    takes it for one."""


class Moment(NamedTuple):
    """A moment of the main thread; times are seconds of the activity's clock.

    `progress` is when it last advanced within its phase, `collective` what it waits for other ranks in ("":
    nothing), `service` the rollout servers that it waits for.
    """

    phase: str
    entered: float
    progress: float
    micro: int = 0
    num_micro: int = 0
    collective: str = ""
    service: str = ""


class Activity:
    """What the main thread is doing at this moment, and how long its phases take.

    Each method replaces the moment as a whole, so a reader needs no lock and never sees half of it.
    """

    __slots__ = (
        "clock",
        "is_asked_to_stop",
        "is_interruptible",
        "may_stop",
        "may_stop_between",
        "moment",
        "num_collectives",
        "spans",
        "step",
        "thread",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        now = clock()
        self.clock = clock
        self.step = 0
        """Optimizer steps taken."""
        self.may_stop = False
        """Whether what the main thread does may end at any moment: a signal raises Stopped in it."""
        self.may_stop_between = False
        """Whether it may end between its steps alone, where ranks that compute together ask each other."""
        self.is_asked_to_stop = False
        """Whether a signal has asked the run to end."""
        self.is_interruptible = False
        """Whether a signal raises KeyboardInterrupt at once: the watchdog has given up on the main thread, or
        the run is over and only trackers are waited for."""
        self.num_collectives = 0
        """Collectives entered so far."""
        self.spans: dict[str, tuple[int, float]] = {}
        """Of each phase: visits that ended, and the seconds of the slowest but for the first EXCLUDED."""
        self.thread = threading.get_ident()
        self.moment = Moment("start", now, now)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A signal ends what is done in here with Stopped. It holds no collective: other ranks go on."""
        self.may_stop = True
        try:
            if self.is_asked_to_stop:
                raise Stopped
            yield
        finally:
            self.may_stop = False

    @contextmanager
    def stoppable_between_steps(self) -> Iterator[None]:
        """A signal raises nothing in here: ranks that compute together look at `has_to_stop` between their
        steps, tell each other, and all raise Stopped at the same one."""
        self.may_stop_between = True
        try:
            yield
        finally:
            self.may_stop_between = False

    @property
    def has_to_stop(self) -> bool:
        """Whether a signal has asked for the end of what may end between its steps."""
        return self.may_stop_between and self.is_asked_to_stop

    def enter(self, phase: str) -> None:
        """Leave the present phase for one of PHASES; the same phase again is another visit."""
        now = self.clock()
        last = self.moment
        visits, slowest = self.spans.get(last.phase, (0, 0.0))
        took = now - last.entered if visits >= EXCLUDED else 0.0
        self.spans[last.phase] = (visits + 1, max(slowest, took))
        self.moment = Moment(phase, now, now)

    def advance(self, micro: int = 0, num_micro: int = 0) -> None:
        """Make progress in the phase: a completion ended, or micro-batch `micro` of `num_micro` begins."""
        last = self.moment
        now = self.clock()
        self.moment = Moment(last.phase, last.entered, now, micro, num_micro, service=last.service)

    def wait(self, collective: str) -> None:
        """Enter a collective: from here on it is the others that are waited for."""
        self.num_collectives += 1
        self.moment = self.moment._replace(collective=collective)

    def leave_collective(self) -> None:
        """Leave the collective, which is progress too."""
        self.moment = self.moment._replace(collective="", progress=self.clock())

    def wait_for_service(self, service: str) -> None:
        """Say which servers, outside this run, are waited for from here on."""
        if self.moment.service != service:
            self.moment = self.moment._replace(service=service)

    def leave_service(self) -> None:
        """Wait for none of them any more."""
        self.wait_for_service("")
