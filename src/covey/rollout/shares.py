"""Scores the part of a rollout that one rank samples, while its episodes end one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from covey.activity import Activity
from covey.environments.agents import Agents
from covey.rewards.protocol import Scored
from covey.rollout.assembly import RankShare
from covey.rollout.slots import Slot
from covey.types import Episode, Outcome, Score, ScorePart

Scorer = Callable[[Sequence[Scored]], Callable[[], list[Score]]]
"""Starts scoring rows; the function that comes back waits for one score a row."""

# Finished groups are handed to the rewards in this many parts, while the others still decode; a part of fewer
# tokens waits for more, as a call of its own would take longer than decoding them.
_PARTS = 4
_PART_TOKENS = 4096


class Share:
    """Takes the episodes of `slots` as they end, and has whole groups of them scored meanwhile.

    One thread may take them, and another one ask for the scores once `is_sampled` says that it can.
    """

    def __init__(self, slots: Sequence[Slot], score: Scorer, agents: Agents | None) -> None:
        self.slots = slots
        self._score, self._agents = score, agents
        self._episodes: dict[int, Episode] = {}
        self._waiting: list[tuple[list[int], Callable[[], list[Score]]]] = []
        self._members: dict[int, list[int]] = {}
        for number, slot in enumerate(slots):
            self._members.setdefault(slot.group, []).append(number)
        self._running = {group: len(numbers) for group, numbers in self._members.items()}
        self._ended: list[int] = []
        self._num_tokens = self._num_taken = 0

    @property
    def is_sampled(self) -> bool:
        """Whether every episode has ended, and all are handed to the rewards."""
        return self._num_taken == len(self.slots)

    @property
    def ended(self) -> Mapping[int, Episode]:
        """The episodes that have ended, by the places of their slots."""
        return dict(self._episodes)

    def take(self, number: int, episode: Episode) -> None:
        """Take the episode of a slot by its place among `slots`. Groups that have ended are handed to the
        rewards several at a time, in slot order, without episodes that are lost."""
        self._episodes[number] = episode
        self._num_tokens += episode.num_trained
        group = self.slots[number].group
        self._running[group] -= 1
        if self._running[group] == 0:
            self._ended += [n for n in self._members[group] if not _is_lost(self._episodes[n])]
        is_part = len(self._ended) * _PARTS >= len(self.slots) and self._num_tokens >= _PART_TOKENS
        if is_part or len(self._episodes) == len(self.slots):
            self._begin_scoring()
        # Last: who sees that all are taken asks for their scores at once.
        self._num_taken += 1

    def _begin_scoring(self) -> None:
        numbers, self._ended, self._num_tokens = sorted(self._ended), [], 0
        if numbers:
            rows = [Scored.of(self.slots[n].prompt, self._episodes[n]) for n in numbers]
            self._waiting.append((numbers, self._score(rows)))

    def scored(self, activity: Activity) -> RankShare:
        """Wait for the scores of a share that is sampled. Environments that rewards have read are let go."""
        scores: dict[int, Score] = {}
        for numbers, wait in self._waiting:
            scores.update(zip(numbers, wait(), strict=True))
            self._release(numbers)
            activity.advance()
        every = range(len(self.slots))
        return RankShare(
            slots=self.slots,
            episodes=[self._episodes[n] for n in every],
            scores=[scores[n] if n in scores else _no_score(self.slots[n]) for n in every],
        )

    def _release(self, numbers: Sequence[int]) -> None:
        keys = [key for n in numbers if (key := self._episodes[n].environment) is not None]
        if keys and self._agents is not None and self._agents.environment is not None:
            self._agents.environment.release(keys)


def _is_lost(episode: Episode) -> bool:
    return episode.outcome is Outcome.INFRASTRUCTURE


def _no_score(slot: Slot) -> Score:
    """Return the score of a lost completion: no reward was asked."""
    return Score(total=None, parts=tuple(ScorePart(name=name, value=None) for name in slot.plan.weights))
