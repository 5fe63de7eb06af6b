"""Where rollouts come from: sampled now, or read from files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from covey.comm import Comm
from covey.data.image_records import NO_ROWS, ImageRows
from covey.data.order import Order
from covey.data.rows import PromptTable
from covey.data.stream import PromptStream
from covey.rewards.registry import total
from covey.rollout.collect import Collected
from covey.rollout.collector import Collector
from covey.rollout.records import groups_of
from covey.rollout.slots import CollectPlan
from covey.telemetry.rollouts import read_rollouts
from covey.types import Origin, Prompt, Score, ScoredGroup


class Source(Protocol):
    """Gives the scored groups of a rollout by its number, whatever was asked for before. Where Stopped ends
    it, it stands as before that rollout; so it does where the newest one is taken back."""

    def next(self, rollout: int) -> Collected: ...

    def take_back(self, rollout: int) -> None: ...

    def close(self) -> None: ...


class PromptSupply(Protocol):
    """Gives the prompts of a rollout by its number."""

    def take(self, rollout: int) -> list[Prompt]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSupply:
    """Prompts of a table in the data's order."""

    prompts: PromptTable
    order: Order

    def take(self, rollout: int) -> list[Prompt]:
        """The prompts of rollout number `rollout`."""
        epoch, numbers = self.order.take(rollout)
        return [self.prompts.take(i, Origin(epoch=epoch, rollout=rollout)) for i in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSupply:
    """Prompts of a stream, as they come."""

    stream: PromptStream
    per_rollout: int

    def take(self, rollout: int) -> list[Prompt]:
        """The prompts of rollout number `rollout`."""
        return self.stream.take(rollout, self.per_rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSource:
    """Prompts as they are supplied, sampled from the weights of the steps taken, and scored.

    `tasks` are those of the data with their rewards; `temperature` gives that of a rollout by its number, or
    None for the plan's.
    """

    supply: PromptSupply
    collector: Collector
    plan: CollectPlan
    tasks: Mapping[str, Collection[str]] = field(default_factory=dict)
    temperature: Callable[[int], float | None] = lambda rollout: None

    @property
    def comm(self) -> Comm:
        """The ranks that collect."""
        return self.collector.comm

    def next(self, rollout: int) -> Collected:
        """Sample and score rollout number `rollout`."""
        return self.sample(self.supply.take(rollout), rollout)

    def sample(self, prompts: Sequence[Prompt], rollout: int) -> Collected:
        """Sample and score these prompts, at the temperature of that rollout. Collective."""
        self.comm.begin("rollout")
        return replace(self.collector.collect(prompts, self.plan_of(rollout)), tasks=self.tasks)

    def plan_of(self, rollout: int) -> CollectPlan:
        """How the completions of that rollout are drawn."""
        temperature = self.temperature(rollout)
        if temperature is None:
            return self.plan
        return replace(self.plan, sampling=replace(self.plan.sampling, temperature=temperature))

    def take_back(self, rollout: int) -> None:
        """Nothing: a rollout depends on its number alone."""

    def close(self) -> None:
        """End the sampling of rollouts that are not finished."""
        self.collector.close()


def upcoming(supply: PromptSupply | None) -> Callable[[int], list[list[int]]] | None:
    """The prompts of a rollout as row and checksum of their tokens and images, where they are known
    beforehand."""
    if not isinstance(supply, TableSupply):
        return None

    def prompts(rollout: int) -> list[list[int]]:
        taken = supply.take(rollout)
        return [
            [p.id, zlib.crc32("".join(m.key for m in p.media).encode(), _crc(p.token_ids))] for p in taken
        ]

    return prompts


def _crc(token_ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes())


class ReplaySource:
    """Rollouts of a directory, in the order of their numbers; rewards are weighted anew, nothing is
    sampled. Images of the data lie in the rows of `images`."""

    def __init__(self, directory: Path, weights: Mapping[str, float], images: ImageRows = NO_ROWS) -> None:
        self._weights, self._images = weights, images
        self._rollouts = [records for _, records in read_rollouts(directory, with_sets=True)]
        found = {record.get("task", "") for records in self._rollouts for record in records}
        self._tasks: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(found - {""}), ())

    @property
    def num_rollouts(self) -> int:
        """How many rollouts the directory holds."""
        return len(self._rollouts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of any rollout."""
        return max(len(record["prompt_ids"]) for records in self._rollouts for record in records)

    def next(self, rollout: int) -> Collected:
        """The rollout at this index of the directory's order."""
        records = self._rollouts[rollout]
        groups = tuple(self._weighted(g) for g in groups_of(records, self._images))
        return Collected(
            groups=groups,
            rollout_s=0.0,
            reward_s=0.0,
            is_replayed=True,
            tasks=self._tasks,
        )

    def take_back(self, rollout: int) -> None:
        """Nothing: a rollout depends on its number alone."""

    def close(self) -> None:
        """Do nothing: a replay starts no sampling."""

    def _weighted(self, scored: ScoredGroup) -> ScoredGroup:
        return replace(scored, scores=tuple(self._total(s) for s in scored.scores))

    def _total(self, score: Score) -> Score:
        if not score.parts:
            return score
        ends = () if score.steps is None else score.steps.ends
        weighed = total(score.parts, [self._weights.get(p.name, 1.0) for p in score.parts], ends)
        return replace(weighed, extras=score.extras)
