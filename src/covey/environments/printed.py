"""Passes some of what tools and environments print to standard error, and drops the rest."""

from __future__ import annotations

import sys
import threading
from typing import IO

from covey.rewards.process import WorkerProcess
from covey.texts import tr

_OF_A_WORKER = 4096
_OF_ALL = 16 * _OF_A_WORKER


class Printed:
    """Passes on the first 4 KB of each worker, and 64 KB of all of them."""

    def __init__(self) -> None:
        self._left = _OF_ALL
        self._lock = threading.Lock()

    def start_worker(self) -> WorkerProcess:
        """Start a worker for tools and environments, whose output is read by a thread."""
        worker = WorkerProcess.start("covey.environments.worker", is_quiet=True)
        threading.Thread(target=self._read, args=(worker.printed,), daemon=True).start()
        return worker

    def _read(self, pipe: IO[bytes]) -> None:
        left = _OF_A_WORKER
        with pipe:
            while chunk := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                if left == 0:
                    continue
                with self._lock:
                    is_over = self._left == 0
                    shown = chunk[: min(left, self._left)]
                    self._left -= len(shown)
                sys.stderr.write(shown.decode("utf-8", "replace"))
                if len(shown) < len(chunk):
                    left = 0
                    words = tr("[what else this worker process prints is not shown]")
                    sys.stderr.write("" if is_over else f"\n{words}\n")
                else:
                    left -= len(shown)
                sys.stderr.flush()
