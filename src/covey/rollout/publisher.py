"""What stands between the weights of a run and the engine that samples from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from covey.rollout.engine import Engine, NamedWeights


class Owner(Protocol):
    """What owns the weights."""

    def rollout_view(self) -> AbstractContextManager[object]:
        """Whole weights for an engine of this process, for a time. Collective."""
        ...

    def weights(self) -> NamedWeights:
        """Whole weights, one at a time. Collective."""
        ...


class Publisher:
    """Has an engine sample from the weights of a version, and gives it them where it is behind."""

    def __init__(self, owner: Owner, engine: Engine) -> None:
        self._owner, self._engine = owner, engine
        self._version: int | None = None

    @contextmanager
    def serve(self, version: int) -> Iterator[Engine]:
        """The engine, whose every token carries `version`; no step may be taken within. Collective."""
        with self._owner.rollout_view():
            if self._version != version:
                self._version = self._engine.publish(self._owner.weights(), version).version
            yield self._engine
