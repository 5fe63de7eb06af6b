"""One worker process as its parent sees it: a question, an answer, a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from covey.errors import CoveyError
from covey.texts import tr
from covey.types import Status

_GRACE_S = 0.2


class WorkerGone(CoveyError):
    """A worker that gave no answer: it ended, or was ended at its time limit."""

    def __init__(self, status: Status, words: str) -> None:
        self.status = status
        super().__init__(words)


class WorkerProcess:
    """A worker in a session of its own, so that Ctrl-C in the terminal reaches the parent alone."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._is_late = False

    @classmethod
    def start(cls, module: str = "covey.rewards.worker", *, is_quiet: bool = False) -> WorkerProcess:
        """Start a worker, which runs this module; what it prints goes to this process's standard error, or
        where it `is_quiet` to the pipe `printed`, which has to be read."""
        return cls(
            subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_quiet else None,
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def printed(self) -> IO[bytes]:
        """The pipe with what a quiet worker prints."""
        assert self._process.stderr is not None
        return self._process.stderr

    def is_running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.poll() is None

    def ask(self, request: str, limit_s: float) -> dict[str, Any]:
        """The answer to a request of one line; WorkerGone where none came within the limit."""
        # The pipes are read and written without a limit of their own: when the time is over the process is
        # ended, which ends both.
        timer = threading.Timer(limit_s, self._end_late)
        timer.start()
        try:
            self.send(request)
            line = self.read_line()
        except OSError:
            line = b""
        finally:
            timer.cancel()
            timer.join()
        if line.endswith(b"\n") and not self._is_late:
            return self.read(line)
        if self._is_late:
            self.kill()
            raise WorkerGone(Status.TIMEOUT, tr("returned nothing within {limit_s:g} s", limit_s=limit_s))
        raise self.gone()

    def send(self, request: str) -> None:
        """Write a request of one line; an OSError where nobody reads it any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except ValueError as error:
            raise BrokenPipeError("closed by another thread") from error

    def read_line(self) -> bytes:
        """Wait for a line of the process; one without its line break is its end."""
        assert self._process.stdout is not None
        try:
            return self._process.stdout.readline()
        except (OSError, ValueError):
            # Another thread has closed it.
            return b""

    def read(self, line: bytes) -> dict[str, Any]:
        """Return the object on a line; WorkerGone where there is none."""
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            self.kill()
            raise WorkerGone(
                Status.ERROR,
                tr("wrote {line!r} to the pipe that its worker process answers on", line=line[:40]),
            ) from None

    def gone(self) -> WorkerGone:
        """Return how a process ended that answers no more."""
        # One that is just ending by itself keeps the exit code it ends with.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()
        return WorkerGone(Status.ERROR, _ending(self._process.returncode))

    def kill(self) -> None:
        """End the process and those that reward functions have started in it."""
        self.end_group()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def end_group(self) -> None:
        """End the process and those that reward functions have started in it, while its pipes are read."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end_late(self) -> None:
        if self._process.poll() is None:
            self._is_late = True
        self.end_group()


def _ending(code: int) -> str:
    if code >= 0:
        return tr("ended the worker process with exit code {code}", code=code)
    name = signal.Signals(-code).name
    cause = tr(", as the operating system does when memory runs out") if name == "SIGKILL" else ""
    return tr("the worker process was killed by {name}{cause}", name=name, cause=cause)
