"""Assigns each row of an optimizer step to the rank that forwards it.

Every rank computes the same assignment from columns that all of them know, so nothing is sent for it.

    R  rows of the step      F  those of them that are forwarded      G  groups of these
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

UNEVEN = 1.1
"""Groups are cut where whole ones would give the slowest rank more than this times the mean."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Holds the rank of each row of an optimizer step.

    `Assignment(rank_of_R=array([0, 0, 1, 1]), tokens_of=array([812, 790]))`: every row has a rank, also one
    that no rank forwards, which stays with its owner. `tokens_of` (world,) are the tokens that each rank
    forwards.
    """

    rank_of_R: Ints
    tokens_of: Ints

    def rows_of(self, rank: int) -> list[int]:
        """Return the numbers of a rank's rows within the step, in order."""
        return [int(number) for number in np.flatnonzero(self.rank_of_R == rank)]

    @property
    def unevenness(self) -> float:
        """Return the tokens of the slowest rank divided by the mean; 1 where no row is forwarded."""
        return _unevenness(self.tokens_of)


def assign(
    tokens_R: Sequence[int] | Ints,
    group_R: Sequence[int] | Ints,
    owner_R: Sequence[int] | Ints,
    world: int,
    prompt_R: Sequence[int] | Ints | None = None,
) -> Assignment:
    """Deal the rows of an optimizer step to `world` ranks, by tokens.

    Of each row: the tokens that it forwards (0: none, as it has no gradient), the number of its group, and
    the rank that holds it. `prompt_R` says how many of the tokens are a prompt that the rows of a group
    share; a rank forwards it once for each of its groups, so there the group's longest counts once.

    Rows without tokens stay with their owners. The others of a group go to one rank, unless the slowest rank
    would then have more than UNEVEN times the mean and cutting groups makes it faster. Of arrangements with
    equally slow ranks, one that leaves rows with their owners is taken.
    """
    tokens, group, owner = (np.asarray(column, dtype=np.int64) for column in (tokens_R, group_R, owner_R))
    prompt = np.zeros_like(tokens) if prompt_R is None else np.asarray(prompt_R, dtype=np.int64)
    assert tokens.shape == group.shape == owner.shape == prompt.shape, "one entry a row"
    assert not owner.size or 0 <= owner.min() <= owner.max() < world, "owners are ranks"
    forwarded = np.flatnonzero(tokens)
    names, number_of = np.unique(group[forwarded], return_inverse=True)
    own = (tokens - prompt)[forwarded]
    assert not own.size or own.min() >= 0, "a prompt is a part of its row"
    prompt_G = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(prompt_G, number_of, prompt[forwarded])
    rows = _Rows(own_F=own, group_F=number_of, owner_F=owner[forwarded], prompt_G=prompt_G, world=world)
    rank_of = owner.copy()
    rank_of[forwarded] = dealt_F = _deal(rows)
    return Assignment(rank_of_R=rank_of, tokens_of=rows.tokens_of(dealt_F))


def _unevenness(tokens_of: Ints) -> float:
    return float(tokens_of.max() / tokens_of.mean()) if tokens_of.any() else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Holds the rows that are forwarded: their tokens beside the prompt, and the prompt of each group."""

    own_F: Ints
    group_F: Ints
    owner_F: Ints
    prompt_G: Ints
    world: int

    def tokens_of(self, rank_of_F: Ints) -> Ints:
        """Return the tokens (world,) that each rank forwards."""
        found = np.zeros(self.world, dtype=np.int64)
        np.add.at(found, rank_of_F, self.own_F)
        num_groups = max(1, len(self.prompt_G))
        rank, group = np.divmod(np.unique(rank_of_F * num_groups + self.group_F), num_groups)
        np.add.at(found, rank, self.prompt_G[group])
        return found

    def slowest(self, rank_of_F: Ints) -> int:
        """Return the tokens of the rank that has the most."""
        return int(self.tokens_of(rank_of_F).max())

    def whole_groups(self) -> list[Ints]:
        """Return the numbers of each group's rows."""
        order = np.argsort(self.group_F, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.group_F[order])) + 1) if len(order) else []

    def cost(self, unit: Ints) -> int:
        """Return the tokens of rows of one group on a rank that has no others of it."""
        return int(self.own_F[unit].sum() + self.prompt_G[self.group_F[unit[0]]])


def _deal(rows: _Rows) -> Ints:
    """Return the rank of each row. Ties go to the arrangement that stands first: it moves fewer rows."""
    if rows.world == 1:
        return rows.owner_F
    groups = rows.whole_groups()
    whole = min((_at_home(rows), _level(groups, rows)), key=rows.slowest)
    if _unevenness(rows.tokens_of(whole)) <= UNEVEN:
        return whole
    return min((whole, rows.owner_F, *_cuts(groups, rows)), key=rows.slowest)


def _at_home(rows: _Rows) -> Ints:
    """Return each group on the rank that holds the most tokens of it, the first of several."""
    held_GW = np.zeros((len(rows.prompt_G), rows.world), dtype=np.int64)
    np.add.at(held_GW, (rows.group_F, rows.owner_F), rows.own_F)
    home_G: Ints = held_GW.argmax(axis=1)
    return home_G[rows.group_F]


def _cuts(groups: Sequence[Ints], rows: _Rows) -> list[Ints]:
    """Return arrangements with ever more groups cut, until one is even enough or rows alone are too large."""
    dealt, found = _level(groups, rows), []
    parts = [[group] for group in groups]
    while _unevenness(tokens_of := rows.tokens_of(dealt)) > UNEVEN:
        limit = UNEVEN * tokens_of.mean()
        slow = [rank for rank in np.argsort(-tokens_of, kind="stable").tolist() if tokens_of[rank] > limit]
        largest: dict[int, Ints] = {}
        for unit in chain.from_iterable(parts):
            rank = int(dealt[unit[0]])
            if len(unit) > 1 and (rank not in largest or rows.cost(unit) > rows.cost(largest[rank])):
                largest[rank] = unit
        if slow[0] not in largest:
            found.append(_level([np.array([row]) for row in range(len(rows.own_F))], rows))
            break
        # One rank at a time cuts the fewest groups; of many a quarter does, or hundreds take seconds.
        cut = [largest[rank] for rank in slow[: max(1, len(slow) // 4)] if rank in largest]
        for number in sorted({int(rows.group_F[unit[0]]) for unit in cut}):
            least = math.ceil(rows.cost(groups[number]) / limit)
            num = min(max(len(parts[number]) + 1, least), len(groups[number]))
            parts[number] = _parts(groups[number], num, rows)
        dealt = _level([*chain.from_iterable(parts)], rows)
        found.append(dealt)
    return found


def _parts(group: Ints, num: int, rows: _Rows) -> list[Ints]:
    """Return a group in `num` parts of about the same tokens: its rows, largest first, each to the smallest
    one."""
    sizes = [(0, part) for part in range(num)]
    members: list[list[int]] = [[] for _ in range(num)]
    for row in sorted(group.tolist(), key=lambda row: (-rows.own_F[row], row)):
        size, part = sizes[0]
        heapq.heapreplace(sizes, (size + int(rows.own_F[row]), part))
        members[part].append(row)
    return [np.array(sorted(part), dtype=np.int64) for part in members if part]


def _level(units: Sequence[Ints], rows: _Rows) -> Ints:
    """Return the rank of each row, where units (whole groups or parts of them) are dealt, largest first, each
    to the rank with the fewest tokens so far; the ranks are then named so that many rows keep their
    owners."""
    rank_of = np.zeros(len(rows.own_F), dtype=np.int64)
    loads = [(0, rank) for rank in range(rows.world)]
    there: set[tuple[int, int]] = set()
    for cost, first, unit in sorted((-rows.cost(unit), int(unit[0]), unit) for unit in units):
        load, rank = loads[0]
        group = int(rows.group_F[first])
        has_prompt = (rank, group) in there
        heapq.heapreplace(loads, (load - cost - has_prompt * int(rows.prompt_G[group]), rank))
        there.add((rank, group))
        rank_of[unit] = rank
    return _renamed(rank_of, rows)


def _renamed(rank_of_F: Ints, rows: _Rows) -> Ints:
    """Return the same arrangement with ranks swapped: largest first, the tokens that a rank would have from
    one owner name it after this owner, where neither has been taken."""
    kept_WW = np.zeros((rows.world, rows.world), dtype=np.int64)
    np.add.at(kept_WW, (rank_of_F, rows.owner_F), rows.own_F)
    name_of = np.full(rows.world, -1, dtype=np.int64)
    is_free = np.ones(rows.world, dtype=bool)
    for pair in np.argsort(-kept_WW, axis=None, kind="stable").tolist():
        rank, owner = divmod(pair, rows.world)
        if not kept_WW[rank, owner]:
            break
        if name_of[rank] < 0 and is_free[owner]:
            name_of[rank], is_free[owner] = owner, False
    name_of[name_of < 0] = np.flatnonzero(is_free)
    return name_of[rank_of_F]
