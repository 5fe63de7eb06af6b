"""The end of a process in which a client is stuck."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

_GRACE_S = 3.0


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
