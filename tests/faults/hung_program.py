"""`python hung_program.py MODE`: a program that calls `covey.train`, in which an update hangs.

The modes: the update hangs in the `main` thread or in another `thread`, or it hangs and then goes on when it
is interrupted (`swallowed`); or a `tracker` never ends, Ctrl-C is pressed, and a thread of the program is
still there when a command would have been ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import covey
from covey.errors import GuardStop
from covey.health.watchdog import Allowance
from covey.telemetry.trackers import factory
from covey.training import loop, watch

OPTIONS = {
    "model": "quickstart",
    "dataset": "quickstart#64",
    "reward_funcs": "accuracy",
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 4,
    "save_steps": 1,
    "output_dir": "run",
}
STEP = 3


def plant(mode: str) -> None:
    update, count = loop.update, 0

    def hanging(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        try:
            while count == STEP:
                # Another thread is interrupted between two calls.
                time.sleep(0.1 if mode == "thread" else 10_000)
        except KeyboardInterrupt:
            if mode != "swallowed":
                raise
        return update(*args, **kwargs)

    loop.update = hanging
    # The phase update begins within the update.
    watch.allowances = lambda *seconds, **more: {"annotate": Allowance(first_s=3.0, floor_s=3.0)}


class Tracker:
    """A client that never ends, before which somebody gets impatient."""

    def log(self, *record: Any) -> None: ...

    table = log

    def close(self, exit_code: int) -> None:
        time.sleep(4.0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10_000)


def train(**more: Any) -> None:
    try:
        outcome = covey.train(**OPTIONS, **more)
    except GuardStop as stop:
        print("stopped:", stop.finding.code)  # noqa: T201
    else:
        print("ended:", outcome.exit_code, outcome.step)  # noqa: T201


def go_on() -> None:
    time.sleep(5.0)
    print("went on")  # noqa: T201


if __name__ == "__main__":
    (mode,) = sys.argv[1:]
    if mode == "tracker":
        factory._open = lambda name, start: Tracker()
        train(report_to=["tensorboard"])
        threading.Thread(target=go_on).start()
        sys.exit(7)
    plant(mode)
    if mode == "thread":
        caller = threading.Thread(target=train)
        caller.start()
        caller.join()
    else:
        train()
    if mode != "swallowed":
        train(resume_from_checkpoint="latest")
