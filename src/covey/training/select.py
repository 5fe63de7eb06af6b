"""Groups without signal, replaced: by further prompts, and by groups of earlier rollouts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from covey.activity import Stopped
from covey.batching.select import SILENCES, Silence, silences, strength
from covey.checkpoint.registry import State
from covey.data.image_records import NO_ROWS, ImageRows
from covey.data.order import Order
from covey.data.rows import PromptTable
from covey.options.schema import CreditOptions
from covey.rollout.collect import Collected, Selection
from covey.rollout.records import groups_of, records_of, with_sets_as_text
from covey.training.source import LiveSource, PromptSupply
from covey.types import Origin, Prompt, ScoredGroup

# Added to data_seed for the order of further prompts: no data_seed that can be typed gives the same order.
FURTHER = 2**63
_REPLAY = 1


class OneByOne:
    """The prompts of a table one at a time, each epoch permuted by `seed`; it holds one epoch's order."""

    def __init__(self, prompts: PromptTable, seed: int) -> None:
        size = len(prompts.entries)
        self._prompts = prompts
        self._order = Order(num_prompts=size, per_rollout=size, seed=seed, shuffle=True)
        self._epoch = -1
        self._numbers: list[int] = []

    def take(self, position: int) -> list[Prompt]:
        """The prompt at a position, counted on from epoch to epoch."""
        epoch, index = divmod(position, self._order.num_prompts)
        if epoch != self._epoch:
            self._epoch, self._numbers = self._order.take(epoch)
        return [self._prompts.take(self._numbers[index], Origin(epoch=epoch, rollout=-1))]


class Further:
    """Prompts beside the run's own order, one after the other; `cursor` counts those that were looked at.

    `supply` gives them one at a time by their position.
    """

    def __init__(self, supply: PromptSupply) -> None:
        self._supply = supply
        self.cursor = 0

    def take(self, count: int, rollout: int, attempt: int, barred: Collection[int]) -> list[Prompt]:
        """The next `count` prompts that are not among `barred`, by their ids.

        Where the data hold too few others, those of this rollout come again, and last of all one twice in
        an attempt.
        """
        taken: list[Prompt] = []
        first: int | None = None
        while len(taken) < count:
            (prompt,) = self._supply.take(self.cursor)
            self.cursor += 1
            epoch = prompt.origin.epoch
            first = epoch if first is None else first
            own = {p.id for p in taken} if epoch - first < 4 else set()
            if prompt.id in own or (epoch - first < 2 and prompt.id in barred):
                continue
            taken.append(replace(prompt, origin=replace(prompt.origin, rollout=rollout, attempt=attempt)))
        return taken


class Replay:
    """The groups of earlier rollouts that had most to tell, at most `size`, the strongest first.

    Of equally strong ones the newer stay. Which are replayed is a function of `seed`, the rollout's number
    and what is held: each group at most once, those of more strength more often, as in TRL.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self.held: list[tuple[float, ScoredGroup]] = []

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Keep the strongest of these and of what is held."""
        new = [(strength(g), _timeless(g)) for g in groups]
        found = sorted([*(n for n in new if n[0] > 0.0), *self.held], key=lambda pair: -pair[0])
        self.held = found[: self.size]

    def choose(self, count: int, rollout: int) -> list[ScoredGroup]:
        """At most `count` of the groups held, chosen without replacement by strength; they stay held."""
        # The largest log(strength) + Gumbel noise: a choice in proportion to strength, one after the other.
        random = np.random.Generator(np.random.PCG64([self._seed, rollout, _REPLAY]))
        noise = random.gumbel(size=len(self.held))
        keys = [float(np.log(s)) + float(g) for (s, _), g in zip(self.held, noise, strict=True)]
        best = sorted(range(len(keys)), key=lambda i: -keys[i])[:count]
        return [self.held[i][1] for i in best]


class SelectingSource:
    """A live source whose groups without signal are replaced, so that a rollout stays as large as planned.

    They are sampled anew with further prompts up to `attempts` times, each time as many as are missing; what
    has signal stays. What is missing then is replayed, and where nothing is held the first ones stay. Every
    rank knows every group, so all of them decide alike. Images of the groups that a checkpoint holds lie in
    `images`.
    """

    name = "selection"

    def __init__(
        self,
        live: LiveSource,
        credit: CreditOptions,
        further: Further,
        replay: Replay,
        attempts: int,
        images: ImageRows = NO_ROWS,
    ) -> None:
        self.live = live
        self._credit = credit
        self._further = further
        self._replay = replay
        self._attempts = attempts
        self._images = images
        self._before: tuple[int, int, list[tuple[float, ScoredGroup]]] | None = None

    def next(self, rollout: int) -> Collected:
        """Sample, score and select rollout number `rollout`. Collective."""
        self._before = (rollout, self._further.cursor, self._replay.held)
        try:
            return self._selected(rollout)
        except Stopped:
            self.take_back(rollout)
            raise

    def take_back(self, rollout: int) -> None:
        """Stand as before this rollout, where it is the newest one: the same prompts are drawn again, and no
        group of it is held."""
        if self._before is not None and self._before[0] == rollout:
            _, self._further.cursor, self._replay.held = self._before

    def close(self) -> None:
        """End the sampling of rollouts that are not finished."""
        self.live.close()

    def _selected(self, rollout: int) -> Collected:
        parts = [self.live.next(rollout)]
        groups = list(parts[0].groups)
        silent = _silent(silences(groups, self._credit))
        dropped: dict[str, list[int]] = {why: [] for why in SILENCES}
        for attempt in range(1, self._attempts + 1):
            if not silent:
                break
            taken = {g.group.prompt.id for part in parts for g in part.groups}
            prompts = self._further.take(len(silent), rollout, attempt, taken)
            parts.append(self.live.sample(prompts, rollout))
            found = parts[-1].groups
            for scored, why in zip(found, silences(found, self._credit), strict=True):
                if why is None:
                    index = min(silent)
                    why = silent.pop(index)
                    groups[index], scored = scored, groups[index]
                dropped[why].append(scored.group.prompt.id)
        stored = self._replay.choose(len(silent), rollout)
        fresh = [g for i, g in enumerate(groups) if i not in silent]
        stale = sorted(silent)[: len(stored)]
        for index, scored in zip(stale, stored, strict=True):
            dropped[silent.pop(index)].append(groups[index].group.prompt.id)
            groups[index] = scored
        self._replay.add(fresh)
        return Collected(
            groups=tuple(groups),
            rollout_s=sum(p.rollout_s for p in parts),
            reward_s=sum(p.reward_s for p in parts),
            tasks=parts[0].tasks,
            stale=frozenset(stale),
            metrics=parts[0].metrics,
            selection=Selection(
                sampled=tuple(g for p in parts for g in p.groups),
                attempts=len(parts) - 1,
                dropped={why: tuple(ids) for why, ids in dropped.items()},
                num_silent=len(silent),
            ),
        )

    def state(self) -> State:
        """Where the further prompts go on, and the groups held as records, which ranks tell each other.
        Collective."""
        comm = self.live.comm
        own = [
            [with_sets_as_text(record) for record in records_of([group], comm.rank)]
            for _, group in self._replay.held
        ]
        every = list(zip(*comm.gather_json(own), strict=True))
        held: Any = [
            [score, sorted(chain.from_iterable(shares), key=itemgetter("sibling"))]
            for (score, _), shares in zip(self._replay.held, every, strict=True)
        ]
        return State(json={"cursor": self._further.cursor, "held": held})

    def load_state(self, state: State) -> None:
        """Go on from there; of the groups as many as this run holds."""
        values: Any = state.json
        self._further.cursor = values["cursor"]
        held = [(score, groups_of(records, self._images)[0]) for score, records in values["held"]]
        self._replay.held = held[: self._replay.size]


def _timeless(scored: ScoredGroup) -> ScoredGroup:
    """The group without what a clock said: replaying it takes no sampling, and its state is that of any run
    like this one."""
    episodes = tuple(replace(e, seconds=0.0) for e in scored.group.episodes)
    return replace(scored, group=replace(scored.group, episodes=episodes))


def _silent(found: Sequence[Silence | None]) -> dict[int, Silence]:
    """The indices of groups without signal, and why they have none."""
    return {index: why for index, why in enumerate(found) if why is not None}
