"""The generators of a process, seeded for one reset at a time."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any


class ResetLock:
    """Lets one reset run at a time. With `restores` the generators are afterwards what they were: a process
    that also trains draws from them."""

    def __init__(self, *, restores: bool) -> None:
        self._restores = restores
        self._lock = threading.Lock()
        self._states: tuple[Any, ...] = ()

    def acquire(self) -> bool:
        """Wait until no reset runs."""
        self._lock.acquire()
        if self._restores:
            self._states = _states()
        return True

    def release(self) -> None:
        """Let the next reset run."""
        if self._restores:
            _restore(*self._states)
        self._lock.release()


def seed_generators(seed: int) -> None:
    """Seed random, and numpy and torch where they are imported."""
    random.seed(seed)
    numpy, torch = _imported()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.default_generator.manual_seed(seed % 2**63)


def _states() -> tuple[Any, ...]:
    numpy, torch = _imported()
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
        None if torch is None else torch.default_generator.get_state(),
    )


def _restore(of_random: Any, of_numpy: Any, of_torch: Any) -> None:
    random.setstate(of_random)
    numpy, torch = _imported()
    if of_numpy is not None and numpy is not None:
        numpy.random.set_state(of_numpy)
    if of_torch is not None and torch is not None:
        torch.default_generator.set_state(of_torch)


def _imported() -> tuple[Any, Any]:
    """numpy and torch where they are imported to their end, else None."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (
        numpy if hasattr(numpy, "random") else None,
        torch if hasattr(torch, "default_generator") else None,
    )
