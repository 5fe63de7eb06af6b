"""What the processes of a run share outside of collectives: that one of them has failed, or has got
a signal.

They leave small files for each other, in the directory of the launching process or in the run directory, and
a thread in each of them polls them. A process that waits in a collective finds it that way, and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from covey.activity import Stopped
from covey.comm import Comm
from covey.errors import CheckpointError, ConfigError, CoveyError, GuardStop, RunFailed
from covey.exits import end_now, meeting_place, started
from covey.health.record import fields_of
from covey.health.watchdog import flush_output
from covey.telemetry.files import RunFiles
from covey.telemetry.owner import Lock
from covey.training import failure
from covey.training.limits import Signals
from covey.training.watch import text_of
from covey.types import Finding

_POLL_S = 0.5
_PATIENCE_S = 10.0
# A process that vanished may only be late with its last word.
_GONE_S = 2.0
# What every rank raises together, and says once.
_RAISED_BY_ALL = (ConfigError, CheckpointError, GuardStop, Stopped)


@dataclass(slots=True)
class Together:
    """The other processes of a run, as one of them sees them; each of `closing` is called before it ends for
    them."""

    comm: Comm
    output_dir: Path
    lock: Lock | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)
    signals: Signals | None = None
    raised: bool = False
    _directory: Path = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _missing_since: dict[int, float] = field(default_factory=dict)
    _has_shared_signal: bool = False
    _polls_with_signal: int = 0
    _polls_without_first: int = 0

    def __post_init__(self) -> None:
        self._directory = meeting_place(self.output_dir)

    def join(self) -> None:
        """Start the thread that watches the others. Collective: files of an earlier run are deleted first."""
        if self.comm.world == 1:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if self.comm.rank == 0:
            for path in self._directory.glob("rank-*"):
                path.unlink()
        self.comm.gather_json(None)
        self._write("process", f"{os.getpid()} {started(os.getpid())}")
        self.comm.gather_json(None)
        threading.Thread(target=self._run, name="together", daemon=True).start()

    def leave(self) -> None:
        """Stop the thread, and let the others know that this process ends by itself."""
        self._stop.set()
        if self.comm.world > 1:
            with contextlib.suppress(OSError):
                self._write("left", "raised" if self.raised else "")

    def fail(self, finding: Finding, code: int) -> None:
        """Record the finding, end every process of the run, and say why, once; a process that is alone goes
        on, to say it itself."""
        if self.comm.world == 1:
            self._record(finding)
            return
        with self._lock:
            # From here on this thread speaks, or another process does.
            self._stop.set()
            if self._is_first_to_fail():
                self._print(finding)
                everyone = self._wait_for_all()
            else:
                everyone = self._leave_quietly()
            end_now(code, leads=True, all_leave=everyone)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(OSError):
                self._poll()

    def _poll(self) -> None:
        first = self._path("left", 0)
        self._polls_without_first += first.exists() and first.read_text(encoding="ascii") == "raised"
        # The first rank ended alone, with a message of its own: what comes next never comes.
        if self._failure_mark.exists() or self._polls_without_first * _POLL_S > _PATIENCE_S:
            self._end_after_another()
        self._pass_signal_on()
        for rank in self._vanished():
            pid = int(self._path("process", rank).read_text().split()[0])
            self.fail(failure.gone(rank, pid, self.comm.activity, self.output_dir), 1)

    def _end_after_another(self) -> None:
        with self._lock:
            if not self._stop.is_set():
                everyone = self._leave_quietly()
                end_now(1, leads=False, all_leave=everyone)

    def _leave_quietly(self) -> bool:
        with contextlib.suppress(OSError):
            self._write("left", "")
        self._close()
        return True

    def _close(self) -> None:
        for close in self.closing:
            close()
        if self.lock is not None:
            self.lock.release()

    def _pass_signal_on(self) -> None:
        """A signal that one process got is for all of them."""
        path = self._directory / "rank-signal"
        received = 0 if self.signals is None else self.signals.received
        if received and not self._has_shared_signal:
            path.write_text(str(received), encoding="ascii")
            self._has_shared_signal = True
        elif not received and self.signals is not None and path.exists():
            self._polls_with_signal += 1
            if self._polls_with_signal == 1:
                # Mostly the system sends it to all of them, one after the other.
                return
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, int(path.read_text(encoding="ascii") or signal.SIGTERM))

    def _vanished(self) -> Sequence[int]:
        """Ranks whose process is not there any more, though it did not say that it ends."""
        now = time.monotonic()
        for rank in range(self.comm.world):
            pid, start = self._path("process", rank).read_text(encoding="ascii").split()
            if str(started(int(pid))) == start or self._path("left", rank).exists():
                self._missing_since.pop(rank, None)
            else:
                self._missing_since.setdefault(rank, now)
        return [rank for rank, since in self._missing_since.items() if now - since > _GONE_S]

    @property
    def _failure_mark(self) -> Path:
        return self._directory / "rank-failed"

    def _is_first_to_fail(self) -> bool:
        """Whether this is the first process to fail."""
        try:
            os.close(os.open(self._failure_mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError:
            # A full disk; whoever started the processes sees that this one ends.
            return True
        return True

    def _record(self, finding: Finding) -> None:
        # Neither is a directory that was deleted made anew for it, nor is it for another one in its place.
        with contextlib.suppress(OSError, CoveyError):
            if self.lock is not None:
                self.lock.check()
            if self.output_dir.is_dir():
                RunFiles(self.output_dir).append_event("finding", step=finding.step, **fields_of(finding))

    def _print(self, finding: Finding) -> None:
        self._record(finding)
        flush_output()
        os.write(2, ("\n".join(text_of(finding)) + "\n").encode())

    def _wait_for_all(self) -> bool:
        """Whether every other process has seen it, and ends."""
        self._close()
        others = [rank for rank in range(self.comm.world) if rank != self.comm.rank]
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if all(self._path("left", rank).exists() or self._is_gone(rank) for rank in others):
                return not any(self._is_gone(rank) for rank in others)
            time.sleep(0.05)
        return False

    def _is_gone(self, rank: int) -> bool:
        pid, start = self._path("process", rank).read_text(encoding="ascii").split()
        return str(started(int(pid))) != start and not self._path("left", rank).exists()

    def _path(self, what: str, rank: int) -> Path:
        return self._directory / f"rank-{rank}-{what}"

    def _write(self, what: str, words: str) -> None:
        self._path(what, self.comm.rank).write_text(words, encoding="ascii")


def _ignore_signals() -> None:
    """Nothing ends this process before it has said why the run ends: torchrun tells it to as soon as another
    one is gone."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def together(comm: Comm, output_dir: Path, lock: Lock | None) -> Iterator[Together]:
    """End all processes of the run where one cannot go on, whatever it was doing.

    RunFailed (F130 to F133) in a run of one process. What all ranks raise together passes.
    """
    others = Together(comm, output_dir, lock)
    others.join()
    try:
        yield others
    except _RAISED_BY_ALL:
        others.raised = True
        raise
    except RunFailed as stop:
        others.fail(stop.finding, stop.exit_code)
        raise
    except (Exception, SystemExit) as error:
        finding = failure.failed(error, comm.rank, comm.world, comm.activity, output_dir)
        if comm.world > 1:
            _ignore_signals()
        with contextlib.suppress(OSError):
            failure.write_stack(output_dir, comm.rank, error)
        if comm.world > 1 and failure.is_of_network(error):
            # Another process is the cause; the thread finds out which, and ends this one.
            time.sleep(2 * _GONE_S + 2 * _POLL_S)
        others.fail(finding, 1)
        raise RunFailed(finding) from error
    finally:
        others.leave()
