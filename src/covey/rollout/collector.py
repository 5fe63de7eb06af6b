"""Collects rollouts and evaluations with the weights of the steps taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from covey.comm import Comm
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.rollout.collect import Collected, collect
from covey.rollout.function_context import RolloutFunction
from covey.rollout.publisher import Publisher
from covey.rollout.shares import Scorer
from covey.rollout.slots import CollectPlan
from covey.types import Prompt


class Collector(Protocol):
    """Samples and scores prompts."""

    @property
    def publisher(self) -> Publisher: ...

    @property
    def codec(self) -> TextCodec: ...

    @property
    def comm(self) -> Comm: ...

    def collect(self, prompts: Sequence[Prompt], plan: CollectPlan) -> Collected:
        """Sample and score prompts with the weights of the steps taken. Collective."""
        ...

    def close(self) -> None:
        """Drop what runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectsInTurn:
    """Collects while nothing is learned."""

    publisher: Publisher
    score: Scorer
    codec: TextCodec
    comm: Comm
    agents: Agents | None = None
    function: RolloutFunction | None = None

    def collect(self, prompts: Sequence[Prompt], plan: CollectPlan) -> Collected:
        """Sample and score prompts with the weights of the steps taken. Collective."""
        with self.publisher.serve(self.comm.activity.step) as engine:
            how = self.agents, self.function
            return collect(prompts, engine, self.score, self.codec, plan, self.comm, *how)

    def close(self) -> None:
        """Nothing: when it returns, nothing runs."""
