"""A worker process that one reward has to itself: started at its first call, with a time limit that grows
with the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from covey.rewards.arguments import as_json
from covey.rewards.callee import Reply
from covey.rewards.pool import Loaded, Pool, PoolPlan, awaited
from covey.rewards.protocol import TrainerState
from covey.rewards.targets import Target
from covey.types import RewardFault


class OwnWorker:
    """Calls one target, one call after the other; `limit_of` gives the seconds for so many rows."""

    def __init__(
        self,
        target: Target,
        options: Mapping[str, Any],
        *,
        load_limit_s: float,
        limit_of: Callable[[int], float],
    ) -> None:
        self._target = target
        self._limit_of = limit_of
        self._pool = Pool(
            PoolPlan(
                plugins=(), options=options, workers=1, timeout_s=load_limit_s, load_limit_s=load_limit_s
            )
        )
        self._thread = ThreadPoolExecutor(1, "own-worker")
        self._loaded: Loaded | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The number of the process, where it runs."""
        return self._pool.pids

    def ask(
        self, arguments: Mapping[str, Sequence[Any]], count: int, state: TrainerState
    ) -> Callable[[], Reply]:
        """Start a call; the function that comes back waits for its reply."""
        texts = as_json(arguments)
        return partial(awaited, self._thread.submit(self._call, texts, count, state))

    def close(self) -> None:
        """End the process; a call in progress ends as failed."""
        self._pool.close()
        self._thread.shutdown(cancel_futures=True)

    def _call(self, arguments: Mapping[str, str], count: int, state: TrainerState) -> Reply:
        if self._loaded is None:
            loaded = self._pool.load(self._target)
            if isinstance(loaded, RewardFault):
                return {"failed": loaded.words, "status": "error", "cause": loaded.cause}
            self._loaded = loaded
        limit_s = self._limit_of(count)
        return awaited(self._pool.call(self._loaded.number, arguments, count, state, limit_s))
