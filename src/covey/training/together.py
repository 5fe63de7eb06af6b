"""Watch the other processes of a run: end with one that has failed, is gone or stopped; pass signals on.

The processes of a machine write small files for each other (`covey.meeting`). A thread in each process reads
these files from its start to its end, so a process that waits in a collective, or for the other ranks to
start, learns of a failure too. One process of each machine hears of the other machines over the network
(`covey.training.machines`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING

from covey.activity import Activity, Stopped, ranks_word
from covey.errors import CheckpointError, ConfigError, GuardStop, ProgramError, RunFailed
from covey.exits import AT_FAULT, GUARDED, RESTARTED, end_now, leave_code
from covey.health.watchdog import flush_output
from covey.meeting import RAISED, Meeting, meeting, remember_run
from covey.telemetry.owner import Lock
from covey.texts import tr
from covey.texts.terminal import say
from covey.training import failure
from covey.training.machines import Failed, Machines, over_machines
from covey.types import Finding

if TYPE_CHECKING:
    from covey.training.limits import Signals

STOPPED_S = 30.0
"""How long a rank may be stopped while this one does not get on either."""

_POLL_S = 0.5
_PATIENCE_S = 10.0
# A process that vanished may only be late with its last word.
_GONE_S = 2.0
# Signs from another machine come every second; this long without one, and a connection to it that broke.
_LOST_S = 4.0
# Longer than a rank may be stopped: another one of the same machine says so sooner.
_SILENT_TIMES = 4 / 3
# A thread that has not polled for this long was stopped itself.
_ASLEEP_S = 5.0
# What every rank raises together, and says once.
_RAISED_BY_ALL = (ConfigError, CheckpointError, GuardStop, Stopped)


@dataclass(slots=True)
class Together:
    """Watches the other processes of a run from one of them; `place` is None where there are none.

    `owns_process`: the process is that of a command; otherwise a program has called a function in its own.
    `output_dir` is known once the run owns it. Each of `closing` is called before the process ends for the
    others; `explain` makes a finding of an error that it knows more of.
    """

    place: Meeting | None
    activity: Activity = field(default_factory=Activity)
    machines: Machines | None = None
    output_dir: Path | None = None
    lock: Lock | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)
    explain: Callable[[BaseException], Finding | None] = lambda error: None
    signals: Signals | None = None
    owns_process: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _polled_at: float = 0.0
    _polls_with_signal: int = 0
    _lost_contact: bool = False

    @property
    def rank(self) -> int:
        """Return this process among the others."""
        return 0 if self.place is None else self.place.rank

    @property
    def world(self) -> int:
        """Return how many processes there are."""
        return 1 if self.place is None else self.place.world

    @property
    def may_exit(self) -> bool:
        """Whether a thread may end this process: it is a command's, or one of several that a launcher started
        and that wait for each other."""
        return self.owns_process or self.place is not None

    def join(self) -> None:
        """Start the thread that watches the others."""
        if self.place is None:
            return
        self.place.come()
        self._polled_at = time.monotonic()
        if self.machines is not None:
            self.machines.start()
        threading.Thread(target=self._run, name="together", daemon=True).start()

    def leave(self) -> None:
        """Stop the thread, and let the others know that this process ends by itself."""
        self._stop.set()
        if self.machines is not None:
            self.machines.leave()
        if self.place is not None:
            self.place.go()

    def fail(self, finding: Finding, code: int) -> None:
        """Record the finding, end every process of the run, and say why, once; a process that is alone goes
        on, to say it itself."""
        if self.place is None:
            failure.record(finding, self.output_dir, self.lock)
            return
        with self._lock:
            # From here on this thread speaks, or another process does.
            self._stop.set()
            may_restart = finding.code in RESTARTED
            if self.place.fail_first():
                if self.machines is None or self.machines.fail_first(finding.code, finding.seen, code):
                    failure.record(finding, self.output_dir, self.lock)
                    self._remember(finding.code, finding.seen)
                    flush_output()
                    failure.say(finding)
                    leave_code(code)
                else:
                    code = self._say_of_another()
                everyone = self._wait_for_all(self.place)
            else:
                self._close()
                everyone = True
            end_now(code, leads=True, all_leave=everyone, may_restart=may_restart)

    def _say_of_another(self) -> int:
        """Say in a line what another machine has said in full, and leave its exit code here."""
        assert self.machines is not None and self.machines.failed is not None
        failed = self.machines.failed
        flush_output()
        self._remember(failed.name, failed.seen)
        failure.say_of_another(failed)
        leave_code(failed.code)
        return failed.code

    def _remember(self, code: str, seen: str) -> None:
        """Tell the processes that torchrun starts in the place of these what has happened."""
        if self.output_dir is not None:
            remember_run(self.output_dir, f"{code}, {seen}" if seen else code)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End all processes of the run where this one cannot go on, whatever they are doing.

        RunFailed (F130 to F135) in a run of one process that has its directory. What all ranks raise together
        passes.
        """
        try:
            with self._ending_for_errors():
                yield
        except (Exception, SystemExit):
            raise
        except BaseException:
            # torchrun tells every process to end as soon as one of them is gone, this one in the middle of
            # its own error maybe; the thread says which it was.
            if self.place is not None and self._ranks_in("gone"):
                _ignore_signals()
                time.sleep(_GONE_S + 3 * _POLL_S)
            raise

    @contextmanager
    def _ending_for_errors(self) -> Iterator[None]:
        try:
            yield
        except _RAISED_BY_ALL as error:
            if self.place is not None:
                self.place.put(RAISED, str(GUARDED if isinstance(error, GuardStop) else AT_FAULT))
            if self.machines is not None:
                self.machines.raise_together()
            raise
        except RunFailed as stop:
            if self.output_dir is not None or self.place is not None:
                self.fail(stop.finding, stop.exit_code)
            raise
        except ProgramError as error:
            assert error.__cause__ is not None
            self._end_for(error.__cause__)
            raise error.__cause__ from None
        except (Exception, SystemExit) as error:
            if self.output_dir is None and self.place is None:
                raise
            raise RunFailed(self._end_for(error)) from error

    def _end_for(self, error: BaseException) -> Finding:
        """End all processes for an error that nothing foresaw; its finding, where this is the only one."""
        if self.place is not None:
            _ignore_signals()
        is_of_another = failure.is_of_another(error)
        if is_of_another and self._raised_elsewhere() is not None:
            # It says itself why it ended.
            self._end_after_another()
        where = failure.Where(self.rank, self.world, self.activity, self.output_dir, self._host())
        finding = self.explain(error) or failure.failed(error, where)
        if self.output_dir is None and not is_of_another:
            # There is no file for it yet.
            say("".join(traceback.format_exception(error)).removesuffix("\n"), sys.stderr)
        elif self.output_dir is not None:
            with contextlib.suppress(OSError):
                failure.write_stack(self.output_dir, self.rank, error)
        if self.place is not None and is_of_another:
            # Another process is the cause; the thread finds out which, and ends this one.
            self._lost_contact = True
            time.sleep(2 * (_GONE_S if self.machines is None else _LOST_S) + 2 * _POLL_S)
        self.fail(finding, 1)
        return finding

    def _run(self) -> None:
        assert self.place is not None
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(OSError):
                self._poll(self.place)

    def _poll(self, place: Meeting) -> None:
        now = time.monotonic()
        if now - self._polled_at > _ASLEEP_S:
            self._since.clear()
        self._polled_at = now
        if self.machines is not None:
            self._listen(self.machines, now)
        if exists(place.failure) or self._waits_for_one_that_raised(place, now):
            self._end_after_another()
        self._pass_signal_on(place)
        for rank in self._ranks_in("gone", _GONE_S):
            self._fail_for("F133", self._process(rank), 1)
        for rank in self._ranks_in("stopped", STOPPED_S):
            if self._idle_s(now) > STOPPED_S:
                self._fail_for("F134", self._process(rank), GUARDED, STOPPED_S)

    def _listen(self, machines: Machines, now: float) -> None:
        """Hear what other machines say, and end where one of them has ended or is silent."""
        machines.mirror()
        if machines.failed is not None:
            self._end_after_machine(machines.failed)
        for silent in machines.silent():
            who = tr("{ranks_word} on {host}", ranks_word=ranks_word(silent.ranks), host=silent.host)
            if self._lost_contact and silent.seconds > _LOST_S:
                self._fail_for("F133", who, 1, silent.seconds)
            limit = STOPPED_S * _SILENT_TIMES
            if silent.seconds > limit and self._idle_s(now) > limit:
                self._fail_for("F136", who, GUARDED, silent.seconds)

    def _fail_for(self, code: str, who: str, exit_code: int, seconds: float = 0.0) -> None:
        """End the run because of other processes, which `who` names."""
        self.fail(failure.of_others(code, who, self.activity, self.output_dir, seconds), exit_code)

    def _process(self, rank: int) -> str:
        assert self.place is not None
        pid, host = (self.place.process(rank) or (0, ""))[0], self._host()
        return tr(
            "rank {rank} (process {pid}{words})",
            rank=rank,
            pid=pid,
            words=tr(" on {host}", host=host) if host else "",
        )

    def _host(self) -> str:
        """Return this machine's name, where there are others."""
        return "" if self.machines is None else self.machines.host

    def _ranks_in(self, state: str, longer_than_s: float = 0.0) -> list[int]:
        """Return the other ranks whose processes have been seen in a state for so long."""
        assert self.place is not None
        now, found = time.monotonic(), []
        for rank in self.place.others:
            if self.place.state(rank) != state:
                self._since.pop((state, rank), None)
            elif now - self._since.setdefault((state, rank), now) >= longer_than_s:
                found.append(rank)
        return found

    def _idle_s(self, now: float) -> float:
        """Return the seconds in which the main thread made no progress."""
        return now - self.activity.moment.progress

    def _waits_for_one_that_raised(self, place: Meeting, now: float) -> bool:
        """Whether another rank has ended alone, with a message of its own: what comes next never comes."""
        if not self.activity.moment.collective or place.has(place.rank, RAISED):
            return False
        if not any(place.has(rank, RAISED) for rank in place.others):
            self._since.pop((RAISED, 0), None)
            return False
        since = self._since.setdefault((RAISED, 0), now)
        return min(now - since, self._idle_s(now)) > _PATIENCE_S

    def _end_after_another(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            assert self.place is not None
            raised = self._raised_elsewhere()
            if not exists(self.place.failure) and raised is not None and self.place.fail_first():
                failure.say_of_another(raised)
                leave_code(raised.code)
            self._close()
            end_now(1 if raised is None else raised.code, leads=False, all_leave=True)

    def _raised_elsewhere(self) -> Failed | None:
        """Return the lowest rank of another machine that has raised an error."""
        if self.machines is None or not self.machines.leads or not self.machines.raised:
            return None
        rank, code = min(self.machines.raised.items())
        return Failed(rank, self.machines.host_of(rank), code, "", "")

    def _end_after_machine(self, failed: Failed) -> None:
        with self._lock:
            assert self.place is not None
            if not self._stop.is_set() and self.place.fail_first():
                self._stop.set()
                may_restart = failed.name in RESTARTED
                code = self._say_of_another()
                everyone = self._wait_for_all(self.place)
                end_now(code, leads=True, all_leave=everyone, may_restart=may_restart)

    def _close(self) -> None:
        for close in self.closing:
            close()
        if self.lock is not None:
            self.lock.release()

    @contextmanager
    def passing_signals(self, signals: Signals) -> Iterator[None]:
        """Have this process get the signals of the others, while the handlers of the run are in place."""
        self.signals = signals
        try:
            yield
        finally:
            with self._lock:
                self.signals = None

    def _pass_signal_on(self, place: Meeting) -> None:
        """Tell the others of a signal that this process has received, and send this one what they have."""
        with self._lock:
            if self.signals is None:
                return
            received, is_known = self.signals.received, exists(place.signal)
            if received and not is_known:
                place.signal.write_text(str(received), encoding="ascii")
            elif is_known and not received:
                self._polls_with_signal += 1
                main = threading.main_thread().ident
                # At the first poll the system may be sending it to all of them, one after the other.
                if self._polls_with_signal > 1 and main is not None:
                    signal.pthread_kill(main, place.read_signal() or signal.SIGTERM)

    def _wait_for_all(self, place: Meeting) -> bool:
        """Whether every other process has seen it, and ends; a stopped one is ended."""
        self._close()
        until = time.monotonic() + _PATIENCE_S
        are_all = True
        while time.monotonic() < until:
            states = {rank: place.state(rank) for rank in place.others}
            for rank, state in states.items():
                known = place.process(rank)
                if state == "stopped" and known is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(known[0], signal.SIGKILL)
            are_all = are_all and not {"gone", "stopped"} & set(states.values())
            if not {"here", "stopped"} & set(states.values()):
                return are_all
            time.sleep(0.05)
        return False


def _ignore_signals() -> None:
    """Go on until it is said why the run ends: torchrun sends SIGTERM as soon as another process is gone."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def together(*, owns_process: bool = False) -> Iterator[Together]:
    """Be one of the processes of a run from here on, and end with them; `owns_process` as in Together."""
    place = meeting()
    machines = Machines(place) if place is not None and over_machines(os.environ) else None
    others = Together(place, machines=machines, owns_process=owns_process)
    others.join()
    try:
        if others.place is None:
            yield others
        else:
            with others.ending():
                yield others
    finally:
        others.leave()
