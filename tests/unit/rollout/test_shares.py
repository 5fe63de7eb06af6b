"""What a rank samples of a rollout, taken by one thread and scored by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.activity import Activity
from covey.rewards.protocol import Scored
from covey.rollout.shares import Share
from covey.rollout.slots import CollectPlan, slots_of
from covey.types import Score
from support.groups import SAMPLING, episode, prompt

PLAN = CollectPlan(num_generations=2, sampling=SAMPLING, seed=5)


def test_it_is_sampled_once_its_last_rows_are_with_the_rewards() -> None:
    """Another thread that waits for this asks for their scores at once, and must find them all."""
    seen: list[bool] = []

    def score(rows: Sequence[Scored]) -> Callable[[], list[Score]]:
        seen.append(share.is_sampled)
        return lambda: [Score(total=1.0, parts=()) for _ in rows]

    share = Share(slots_of([prompt(7), prompt(8)], PLAN), score, None)
    for number, slot in enumerate(share.slots):
        assert not share.is_sampled
        share.take(number, episode(number=slot.prompt.id, sibling=slot.sibling))
    assert share.is_sampled and seen == [False]
    assert [score.total for score in share.scored(Activity()).scores] == [1.0] * 4


def test_a_share_without_slots_is_sampled() -> None:
    assert Share((), lambda rows: list, None).is_sampled
