"""The end of a run that a signal asked for: the launching process waits for the step and the save, and ends
the ranks that do not come to it.

No clock counts from the signal: a step and a save take what they take. Ranks are ended where the user asks
for that (a second Ctrl-C), where one has ended and others stay, and where none makes progress.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.activity import ranks_word
from covey.cli.signals import CODES
from covey.health.hang import read_status
from covey.health.watchdog import Allowance
from covey.texts import tr
from covey.training.failure import of_others
from covey.types import Finding

# After a second Ctrl-C trackers have ten seconds, and nothing else is waited for.
_AT_ONCE_S = 15.0
# All ranks save together, and end together.
_OTHERS_S = 30.0
# The watchdogs of the ranks end a run that makes no progress; this long after their limit they have not.
_GRACE_S = 120.0
# Whoever has not looked for this long was stopped itself, and the ranks with it.
_ASLEEP_S = 10.0
# The second Ctrl-C ends a run without a save, and the third one a process that does not react.
_KILLING_INTERRUPT = 3


@dataclass(slots=True)
class Ending:
    """The signals that a launching process has got, and whether its ranks still have time to end.

    Where ranks had to be ended that the user had not given up, `why` says what for.
    """

    output_dir: Path
    received: list[int] = field(default_factory=list)
    why: str = ""
    clock: Callable[[], float] = time.monotonic
    _hurries_at: float | None = None
    _one_ended_at: float | None = None
    _progress: _Progress = field(init=False)

    def __post_init__(self) -> None:
        self._progress = _Progress(self.output_dir)

    @property
    def is_hurried(self) -> bool:
        """Whether Ctrl-C came after another signal: nobody waits for a checkpoint any more."""
        return signal.SIGINT in self.received[1:]

    def receive(self, number: int) -> int:
        """Note a signal and return the one that the ranks get for it. A repeated SIGTERM asks for nothing
        new: schedulers send it twice."""
        self.received.append(number)
        if not self.is_hurried or number != signal.SIGINT:
            return number
        if self._hurries_at is None:
            self._hurries_at = self.clock()
        is_third = 1 + self.received[1:].count(signal.SIGINT) >= _KILLING_INTERRUPT
        return signal.SIGKILL if is_third else number

    def is_overdue(self, *, has_one_ended: bool) -> bool:
        """Whether the ranks that are left have to be ended now; asked again and again, from the first signal
        on."""
        now = self.clock()
        idle_s = self._progress.overdue_s(now)
        if has_one_ended and self._one_ended_at is None:
            self._one_ended_at = now
        if self._hurries_at is not None and now - self._hurries_at > _AT_ONCE_S:
            return True
        if self._one_ended_at is not None and now - self._one_ended_at > _OTHERS_S:
            self.why = tr("It had not ended {seconds:.0f} s after another rank.", seconds=_OTHERS_S)
        elif idle_s > _GRACE_S:
            self.why = tr(
                "No rank had made progress for {seconds:.0f} s longer than its phase may take.",
                seconds=idle_s,
            )
        return bool(self.why)


@dataclass(slots=True)
class _Progress:
    """How far the ranks of a run get, by what their watchdogs write once a second into its directory."""

    output_dir: Path
    _changes: dict[str, tuple[int, float]] = field(default_factory=dict)
    _looked_at: float = 0.0

    def overdue_s(self, now: float) -> float:
        """Return by how many seconds every rank has passed the limit of its phase; below 0 while one has not.

        Where no rank says anything it is the limit of a first phase, from the first look on.
        """
        if now - self._looked_at > _ASLEEP_S:
            self._changes.clear()
        self._looked_at = now
        over = []
        for path in self.output_dir.glob("status-rank-*.json"):
            status = read_status(path)
            if status is not None:
                over.append(
                    status.seconds + self._unchanged_s(path.name, status.beat, now) - status.allowed_s
                )
        return min(over, default=self._unchanged_s("", 0, now) - Allowance().first_s)

    def _unchanged_s(self, name: str, beat: int, now: float) -> float:
        known = self._changes.get(name)
        if known is None or known[0] != beat:
            known = self._changes[name] = (beat, now)
        return now - known[1]


def code_after_signal(number: int, codes: Iterable[int]) -> int:
    """Return what a launcher ends with after a signal, by what its ranks ended with.

    It is 128 + the signal where each of them ended by itself or by that signal, else the code of one that did
    not: 128 + its signal where one ended it.
    """
    expected = {0, *CODES.values(), *(-n for n in CODES)}
    failed = [code if code > 0 else 128 - code for code in codes if code not in expected]
    return max(failed, default=128 + number)


def killed(ranks: Sequence[int], ending: Ending) -> Finding:
    """F133 of ranks that were killed and could not say so; after a signal it also says that no checkpoint was
    saved for it."""
    finding = of_others("F133", ranks_word(ranks), None, ending.output_dir)
    if not ending.received:
        return finding
    seen = tr(
        "{ranks} ended without an error message after {signal}, before a checkpoint was saved",
        ranks=ranks_word(ranks),
        signal="Ctrl-C" if ending.received[0] == signal.SIGINT else "SIGTERM",
    )
    return replace(finding, seen=seen, cause=ending.why or finding.cause)
