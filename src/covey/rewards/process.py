"""One worker process as its parent sees it: a question, an answer, a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

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
    def start(cls) -> WorkerProcess:
        """Start a worker; what it prints goes to this process's standard error."""
        return cls(
            subprocess.Popen(
                [sys.executable, "-m", "covey.rewards.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, request: str, limit_s: float) -> dict[str, Any]:
        """The answer to a request of one line; WorkerGone where none came within the limit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # The pipes are read and written without a limit of their own: when the time is over the process is
        # ended, which ends both.
        timer = threading.Timer(limit_s, self._end_late)
        timer.start()
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        finally:
            timer.cancel()
            timer.join()
        if line.endswith(b"\n") and not self._is_late:
            return self._read(line)
        if not self._is_late:
            # A worker that is just ending by itself keeps the exit code it ends with.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self.kill()
        if self._is_late:
            raise WorkerGone(Status.TIMEOUT, tr("returned nothing within {limit_s:g} s", limit_s=limit_s))
        raise WorkerGone(Status.ERROR, _ending(self._process.returncode))

    def _read(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            self.kill()
            raise WorkerGone(
                Status.ERROR,
                tr("wrote {line!r} to the pipe that its worker process answers on", line=line[:40]),
            ) from None

    def kill(self) -> None:
        """End the process and those that reward functions have started in it."""
        self._end_group()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _end_late(self) -> None:
        if self._process.poll() is None:
            self._is_late = True
        self._end_group()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return tr("ended the worker process with exit code {code}", code=code)
    name = signal.Signals(-code).name
    cause = tr(", as the operating system does when memory runs out") if name == "SIGKILL" else ""
    return tr("the worker process was killed by {name}{cause}", name=name, cause=cause)
