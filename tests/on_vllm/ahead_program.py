"""`python ahead_program.py KIND WORDS…`: `covey rollout --engine vllm`, which rests between two of its steps.

With `keeps` requests that run go on, at a publish, with the keys and values of the weights before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from covey.cli.main import main
from covey.rollout.vllm.engine import VllmEngine
from covey.types import Completion

REST_S = 0.02


def rest() -> None:
    """Rest, so that versions are published while requests run."""
    real = VllmEngine.step

    def step(self: Any) -> list[Completion]:
        time.sleep(REST_S)
        return real(self)

    VllmEngine.step = step  # type: ignore[method-assign]


def keep_the_cache() -> None:
    """Plant the fault: nothing is computed again. No prefix is cached, so that it is in what runs alone."""
    real = VllmEngine.__init__

    def init(self: Any, settings: Any, *args: Any, **more: Any) -> None:
        real(self, replace(settings, prefix_caching=False), *args, **more)

    def begin(self: Any, version: int) -> None:
        self._version, self._has_weights = version, True

    VllmEngine.__init__, VllmEngine._begin = init, begin  # type: ignore[method-assign]


if __name__ == "__main__":
    rest()
    if sys.argv[1] == "keeps":
        keep_the_cache()
    sys.exit(main(sys.argv[2:]))
