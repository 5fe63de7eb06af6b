"""`python hung_run.py FAULT WORDS…`: `covey` with a fault planted in rank 1 and a short time limit.

The command starts its processes with this file in the place of the module covey: the fault is in them.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from covey.cli import launch
from covey.cli.main import main
from covey.health.watchdog import Allowance

# The times of the third visit are the first that are learned from.
STEP = 4


def sleep_forever() -> None:
    time.sleep(10_000)


def plant(fault: str) -> None:
    """Replace what the fault is in, in this process alone."""
    from covey.learner.backends.ddp import DDPBackend
    from covey.training import loop, watch

    watch.allowances = lambda *seconds, **more: {"update": Allowance(floor_s=2.0)}
    if os.environ["RANK"] != "1":
        return
    count = 0
    backward, update = DDPBackend.backward, loop.update

    def stuck(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == STEP:
            sleep_forever()
        return backward(*args, **kwargs)

    def uneven(batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == STEP:
            batch = replace(batch, micro_batches=batch.micro_batches * 2)
        return update(batch, *args, **kwargs)

    if fault == "stuck":
        DDPBackend.backward = stuck
    else:
        loop.update = uneven


if __name__ == "__main__":
    if "RANK" in os.environ:
        plant(sys.argv[1])
    own = launch.command

    def command(*args: Any) -> list[str]:
        words = own(*args)
        at = words.index("covey")
        return [*words[: at - 1], __file__, sys.argv[1], *words[at + 1 :]]

    launch.command = command
    sys.exit(main(sys.argv[2:]))
