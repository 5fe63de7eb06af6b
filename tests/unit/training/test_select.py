"""Groups without signal are replaced in their places; the others stay, whatever is drawn after them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from covey.checkpoint.exact import JSON
from covey.comm import Comm, LocalComm
from covey.data.order import Order
from covey.data.rows import PromptTable
from covey.health.weights import WeightWatch
from covey.rollout.collect import Collected
from covey.training.guards import Guards
from covey.training.select import FURTHER, Further, OneByOne, Replay, SelectingSource
from covey.types import Batch, Denominators, KeptSets, MicroBatch, Origin, Prompt, Score, ScoredGroup
from support.checks import config
from support.groups import episode, prompt, scored
from support.options import credit
from support.owners import Held

CREDIT = credit()
FLAT, LOUD = (1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 0.0, 0.0)


def group(asked: Prompt, totals: Sequence[float], version: int = 0, vocab: int = 0) -> ScoredGroup:
    """With a `vocab` each token was drawn from half of it."""
    episodes = [
        episode(asked.token_ids, (i,), number=asked.id, sibling=i, origin=asked.origin, version=version)
        for i in range(len(totals))
    ]
    if vocab:
        half = KeptSets.of([range(vocab // 2)], vocab)
        rows = [(replace(e.tokens[0], kept=half),) for e in episodes]
        episodes = [replace(e, sequences=own) for e, own in zip(episodes, rows, strict=True)]
    return scored(episodes, [Score(total=t, parts=()) for t in totals], asked=asked)


def table(size: int) -> OneByOne:
    """That many rows in an order of their own."""
    entries = tuple(prompt(n) for n in range(size))
    return OneByOne(PromptTable(entries=entries, left_out={}, columns=(), longest_in_data=1), 7)


@dataclass
class Live:
    """Samples prompts 0, 1, 2, ... for each rollout; the rows of `flat` have no signal."""

    flat: set[int]
    vocab: int = 0
    comm: Comm = field(default_factory=LocalComm)
    asked: list[list[int]] = field(default_factory=list)
    attempts: list[set[int]] = field(default_factory=list)

    def next(self, rollout: int) -> Collected:
        return self.sample([prompt(n, origin=Origin(epoch=0, rollout=rollout)) for n in range(4)], rollout)

    def sample(self, prompts: Sequence[Prompt], rollout: int) -> Collected:
        assert all(p.origin.rollout == rollout for p in prompts)
        self.asked.append([p.id for p in prompts])
        self.attempts.append({p.origin.attempt for p in prompts})
        groups = tuple(group(p, FLAT if p.id in self.flat else LOUD, rollout, self.vocab) for p in prompts)
        return Collected(groups=groups, rollout_s=1.0, reward_s=0.5)


def further(size: int = 10) -> Further:
    return Further(table(size))


def source(live: Live, attempts: int, held: int = 0, size: int = 10) -> SelectingSource:
    return SelectingSource(live, CREDIT, further(size), Replay(held, 3), attempts=attempts)  # type: ignore[arg-type]


def ids(collected: Collected) -> list[int]:
    return [g.group.prompt.id for g in collected.groups]


def test_what_has_signal_stays_and_the_rest_is_drawn_anew() -> None:
    """Rows 1 and 3 are flat. The first draw beside takes two prompts, the next as many as it left flat."""
    live = Live({1, 3, 6, 7})
    found = source(live, attempts=8).next(0)
    assert found.selection is not None
    assert ids(found)[::2] == [0, 2]
    assert set(ids(found)[1::2]) <= {4, 5, 8, 9} and len(set(ids(found))) == 4
    missing = [2]
    for asked in live.asked[1:]:
        assert len(asked) == missing[-1]
        missing.append(missing[-1] - sum(n not in live.flat for n in asked))
    assert missing[-1] == 0
    assert live.attempts == [{n} for n in range(len(live.asked))]
    assert found.selection.attempts == len(live.asked) - 1
    drawn = [n for asked in live.asked for n in asked]
    assert [g.group.prompt.id for g in found.selection.sampled] == drawn
    assert sorted(found.selection.dropped["equal"]) == sorted(n for n in drawn if n in live.flat)
    assert found.selection.num_silent == 0
    assert (found.rollout_s, found.reward_s) == (len(live.asked), 0.5 * len(live.asked))


def test_a_rollout_with_signal_draws_nothing() -> None:
    live = Live(set())
    found = source(live, attempts=3, held=4).next(0)
    assert live.asked == [[0, 1, 2, 3]] and ids(found) == [0, 1, 2, 3]
    assert found.selection is not None and found.selection.attempts == 0 and not found.stale


def test_what_stays_short_is_filled_with_the_first_ones() -> None:
    """Everything but row 0 is flat: after two draws the places still hold what was drawn for them."""
    live = Live(set(range(1, 10)))
    found = source(live, attempts=2).next(0)
    assert ids(found) == [0, 1, 2, 3]
    assert found.selection is not None
    assert (found.selection.attempts, found.selection.num_silent) == (2, 3)
    # Ten rows: four of the rollout, three, and the other three.
    assert sorted(found.selection.dropped["equal"]) == [4, 5, 6, 7, 8, 9]


def test_the_places_of_further_prompts_are_gone_through_once() -> None:
    """None is drawn that is barred; the cursor goes on over what was passed by."""
    prompts = further()
    order = [p.id for place in range(20) for p in table(10).take(place)]
    held = table(10)
    assert [held.take(place)[0].id for place in range(20)] == order
    assert [held.take(place)[0].origin.epoch for place in (9, 10)] == [0, 1]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    barred = {order[0], order[2]}
    taken = prompts.take(3, rollout=5, attempt=2, barred=barred)
    assert [p.id for p in taken] == [order[1], order[3], order[4]]
    assert prompts.cursor == 5
    assert {(p.origin.rollout, p.origin.attempt) for p in taken} == {(5, 2)}
    assert [p.id for p in prompts.take(2, 5, 3, set())] == order[5:7]


def test_data_that_have_no_others_give_the_same_again() -> None:
    """Four rows, all of them of this rollout; still none stands twice in a draw."""
    taken = further(4).take(4, rollout=0, attempt=1, barred={0, 1, 2, 3})
    assert sorted(p.id for p in taken) == [0, 1, 2, 3]
    assert len(further(2).take(5, rollout=0, attempt=1, barred=set())) == 5


def test_the_order_is_not_that_of_any_data_seed() -> None:
    orders = [
        Order(num_prompts=50, per_rollout=50, seed=s, shuffle=True).take(0)[1] for s in (1, 1 + FURTHER)
    ]
    assert orders[0] != orders[1] and FURTHER >= 2**63


# -- groups of earlier rollouts ----------------------------------------------------------------------------


def test_stored_groups_take_what_is_still_missing() -> None:
    """The first rollout has nothing to replay; the second replays rows 0 and 2 of the first."""
    live = Live({1, 3})
    both = source(live, attempts=0, held=4)
    first = both.next(0)
    assert (ids(first), first.stale) == ([0, 1, 2, 3], frozenset())
    second = both.next(1)
    assert second.stale == {1, 3} and ids(second)[::2] == [0, 2] and set(ids(second)[1::2]) == {0, 2}
    versions = [list(g.group.episodes[0].versions) for g in second.groups]
    assert versions == [[1], [0], [1], [0]]
    assert second.selection is not None
    assert second.selection.dropped["equal"] == (1, 3) and second.selection.num_silent == 0
    assert [g.group.prompt.id for g in second.selection.sampled] == [0, 1, 2, 3]


def test_prompts_are_drawn_before_groups_are_replayed() -> None:
    """Of ten rows 8 and 9 alone have signal beside 0; what the draw does not find is replayed."""
    live = Live({1, 2, 3, 4, 5, 6, 7})
    both = source(live, attempts=1, held=8)
    first, second = both.next(0), both.next(1)
    assert first.selection is not None and second.selection is not None
    loud = [n for n in live.asked[1] if n not in live.flat]
    assert first.selection.num_silent == 3 - len(loud)
    assert second.selection.attempts == 1
    fresh = 1 + sum(n not in live.flat for n in live.asked[3])
    held = 1 + len(loud)
    assert len(second.stale) == min(held, 4 - fresh) > 0
    assert second.selection.num_silent == 4 - fresh - len(second.stale)


def test_the_strongest_are_held_and_the_newer_of_equal_ones() -> None:
    replay = Replay(2, 0)
    replay.add([group(prompt(0), LOUD), group(prompt(1), (1.0, 1.0, 0.0, 0.0)), group(prompt(2), FLAT)])
    assert [g.group.prompt.id for _, g in replay.held] == [1, 0]
    replay.add([group(prompt(3), LOUD)])
    assert [g.group.prompt.id for _, g in replay.held] == [1, 3]
    replay.add([group(prompt(4), (9.0, 0.0, 0.0, 0.0))])
    assert [g.group.prompt.id for _, g in replay.held] == [4, 1]


def test_a_draw_is_by_strength_without_replacement_and_of_the_rollout_alone() -> None:
    """Strengths 1.5 and 13.5 (but for the 1e-4 beside the spread): the stronger comes first in 9 of 10."""
    replay = Replay(8, 11)
    replay.add([group(prompt(0), LOUD), group(prompt(1), (9.0, 0.0, 0.0, 0.0))])
    first = [replay.choose(1, rollout)[0].group.prompt.id for rollout in range(4000)]
    assert 0.885 < sum(first) / len(first) < 0.915
    assert [replay.choose(1, r)[0].group.prompt.id for r in range(100)] == first[:100]
    assert sorted(g.group.prompt.id for g in replay.choose(5, 0)) == [0, 1]
    assert Replay(8, 11).choose(3, 0) == [] and len(replay.held) == 2


@pytest.mark.parametrize("vocab", [0, 10, 1000])
@pytest.mark.parametrize("held", [0, 4])
def test_another_process_goes_on_where_the_state_says(held: int, vocab: int) -> None:
    flat = {1, 3, 5, 7}
    whole, cut = source(Live(flat, vocab), 2, held), source(Live(flat, vocab), 2, held)
    for rollout in range(2):
        whole.next(rollout)
        cut.next(rollout)
    state = cut.state()
    stored: JSON = json.loads(json.dumps(state.json))
    again = source(Live(flat, vocab), 2, held)
    again.load_state(type(state)(json=stored))  # type: ignore[arg-type]
    for rollout in range(2, 5):
        found, expected = again.next(rollout), whole.next(rollout)
        assert ids(found) == ids(expected) and found.stale == expected.stale
        assert tokens(found) == tokens(expected)
    assert again.state() == whole.state()


def test_a_rollout_that_is_taken_back_comes_again() -> None:
    """The newest one alone: an earlier one has been learned from."""
    flat = {1, 3, 5, 7}
    whole, refused = source(Live(flat), 2, 4), source(Live(flat), 2, 4)
    for rollout in range(3):
        expected = whole.next(rollout)
        refused.next(rollout)
        refused.take_back(rollout - 1)
        refused.take_back(rollout)
        assert tokens(refused.next(rollout)) == tokens(expected)
    assert refused.state() == whole.state()


def tokens(collected: Collected) -> list[Any]:
    return [
        (t.sequences, t.id, s.total)
        for g in collected.groups
        for t, s in zip(g.group.episodes, g.scores, strict=True)
    ]


def test_a_smaller_buffer_takes_over_what_fits() -> None:
    large = source(Live({1}), 0, held=4)
    large.next(0)
    small = source(Live({1}), 0, held=2)
    small.load_state(large.state())
    assert len(small.state().json["held"]) == 2  # type: ignore[arg-type]


# -- what a guard asks of a step that has them -------------------------------------------------------------


def micro(age_N: torch.Tensor | None) -> MicroBatch:
    nothing = torch.zeros(0)
    return MicroBatch(
        tokens_T=nothing,
        positions_T=nothing,
        segments=(),
        num_rows=1,
        context_U=nothing,
        context_N=nothing,
        target_N=nothing,
        sequence_N=nothing,
        temperature_N=nothing,
        sampler_logprob_N=nothing,
        advantage_N=nothing,
        old_logprob_N=None,
        ref_logprob_N=None,
        trained_count_S=nothing,
        episode_count_S=nothing,
        group_S=nothing,
        age_N=age_N,
    )


@pytest.mark.parametrize(("stale", "wanted"), [(None, True), (torch.tensor([0, 1]), False)])
def test_a_gradient_is_compared_where_every_ratio_is_one(stale: torch.Tensor | None, wanted: bool) -> None:
    batch = Batch(
        micro_batches=(micro(None), micro(stale)),
        has_signal=(True, False),
        denominators=Denominators(num_episodes=2, num_tokens=2, max_completion_length=2),
        dropped={},
        num_rows=2,
        groups=range(1),
        rollout=0,
        pass_index=0,
    )
    guards = Guards(
        comm=LocalComm(),
        options=config(),
        num_episodes=2,
        plain_loss=None,
        is_comparable=True,
        is_low_precision=False,
        engine="native",
        weights=WeightWatch(Held()),
    )
    assert guards.is_second_gradient_due(batch, is_fresh=True) is wanted
