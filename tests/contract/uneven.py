"""Ranks that are not even: which of them has the tokens of a rollout, and which forwards the rows of a step.

Replayed rollouts are read whole by every rank, and rows are dealt so that ranks have nearly equal tokens.
What is planted here makes each rank forget the tokens that it is not to own, and deals rows anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest

from covey.batching import shares
from covey.batching.assignment import Assignment
from covey.rollout.repetition import is_repetitive
from covey.training.source import Collected, ReplaySource
from covey.types import ScoredGroup
from covey.types.episode import Episode, held, summary_of

Share = Literal["evenly", "0 but one", "0", "1 but one", "1"]
"""All are a rank's, or all but one; the other of two ranks has that one. `evenly`: as covey does."""


@dataclass(frozen=True)
class Given:
    """What a share says: the rank that has all, and how many the other one has."""

    rank: int
    num_others: int


def given(share: Share) -> Given | None:
    """What a share says; None where covey shares."""
    return None if share == "evenly" else Given(int(share[0]), int(share.endswith("but one")))


def plant(patch: pytest.MonkeyPatch, rank: int, owned: Share, dealt: Share) -> None:
    """Have episodes owned, and rows dealt, by these shares from here on, on this rank of two."""
    owners, dealing = given(owned), given(dealt)
    if owners is not None:
        _plant_owners(patch, rank, owners)
    if dealing is not None:
        _plant_dealing(patch, dealing)


def _plant_owners(patch: pytest.MonkeyPatch, rank: int, owners: Given) -> None:
    real = ReplaySource.next

    def next_(source: ReplaySource, rollout: int) -> Collected:
        found = real(source, rollout)
        num = sum(len(scored.group.episodes) for scored in found.groups)
        # The other rank's episode is the first of the rollout, which a step forwards with its siblings.
        owner_of = iter([1 - owners.rank] * owners.num_others + [owners.rank] * (num - owners.num_others))
        return replace(found, groups=tuple(_owned(scored, owner_of, rank) for scored in found.groups))

    patch.setattr(ReplaySource, "next", next_)


def _owned(scored: ScoredGroup, owner_of: Any, rank: int) -> ScoredGroup:
    """The group as a rank has it where its episodes have these owners."""
    episodes = tuple(_known(episode, next(owner_of), rank) for episode in scored.group.episodes)
    return replace(scored, group=replace(scored.group, episodes=episodes))


def _known(episode: Episode, owner: int, rank: int) -> Episode:
    """What a rank knows of an episode of its owner's."""
    if owner == rank:
        return replace(episode, owner=owner)
    repeats = is_repetitive(episode.trained_ids)
    told = tuple(replace(summary_of(held(s)), is_repetitive=repeats) for s in episode.sequences)
    return replace(episode, sequences=told, text="", owner=owner)


def _plant_dealing(patch: pytest.MonkeyPatch, dealing: Given) -> None:
    """Give one rank every row of a step, and the other one its last rows that are forwarded."""
    real = shares.assign

    def assign(tokens: Any, group: Any, owner: Any, world: int, prompt: Any = None) -> Assignment:
        if world == 1:
            return real(tokens, group, owner, world, prompt)
        rank_of = np.full(len(tokens), dealing.rank)
        rank_of[np.flatnonzero(tokens)[::-1][: dealing.num_others]] = 1 - dealing.rank
        loads = [_load(real, rank_of == rank, tokens, group, prompt) for rank in range(world)]
        return Assignment(rank_of_R=rank_of, tokens_of=np.array(loads))

    patch.setattr(shares, "assign", assign)


def _load(real: Any, is_here: Any, tokens: Any, group: Any, prompt: Any) -> int:
    """The tokens of a rank that has these rows: those of one that has no others beside it."""
    own = None if prompt is None else prompt * is_here
    return int(real(tokens * is_here, group, np.zeros(len(tokens), dtype=int), 1, own).tokens_of[0])
