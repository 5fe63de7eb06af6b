"""The order of prompts: a pure function of seed and position."""

from __future__ import annotations

from dataclasses import replace

from covey.data.order import Order

SHUFFLED = Order(num_prompts=23, per_rollout=5, seed=3, shuffle=True)


def test_in_order_by_hand():
    # Five prompts, two a rollout: the fifth is the tail that every epoch leaves out.
    order = Order(num_prompts=5, per_rollout=2, seed=0, shuffle=False)
    assert order.rollouts_per_epoch == 2
    assert [order.take(i) for i in range(5)] == [
        (0, [0, 1]),
        (0, [2, 3]),
        (1, [0, 1]),
        (1, [2, 3]),
        (2, [0, 1]),
    ]


def test_an_epoch_draws_every_prompt_at_most_once_and_drops_the_tail():
    assert SHUFFLED.rollouts_per_epoch == 4
    for epoch in range(3):
        taken = [SHUFFLED.take(4 * epoch + i) for i in range(4)]
        assert {e for e, _ in taken} == {epoch}
        numbers = [n for _, part in taken for n in part]
        assert len(numbers) == len(set(numbers)) == 20
        assert set(numbers) <= set(range(23))
        assert numbers != sorted(numbers)


def test_epochs_differ_and_their_tails_too():
    epochs = [[n for i in range(4) for n in SHUFFLED.take(4 * epoch + i)[1]] for epoch in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    # What one epoch leaves out another draws.
    assert set().union(*epochs) == set(range(23))


def test_a_position_is_drawn_the_same_wherever_a_run_begins():
    forwards = [SHUFFLED.take(i) for i in range(12)]
    backwards = [replace(SHUFFLED).take(i) for i in reversed(range(12))]
    assert backwards[::-1] == forwards
    assert Order(num_prompts=23, per_rollout=5, seed=3, shuffle=True).take(9) == forwards[9]


def test_the_seed_matters_and_only_when_shuffled():
    other = replace(SHUFFLED, seed=4)
    assert [other.take(i) for i in range(4)] != [SHUFFLED.take(i) for i in range(4)]
    plain = replace(SHUFFLED, shuffle=False)
    assert [replace(plain, seed=4).take(i) for i in range(9)] == [plain.take(i) for i in range(9)]


def test_the_number_of_prompts_a_rollout_does_not_change_their_order():
    small = replace(SHUFFLED, per_rollout=1)
    assert [n for i in range(20) for n in small.take(i)[1]] == [
        n for i in range(4) for n in SHUFFLED.take(i)[1]
    ]


def test_the_shuffle_is_the_one_of_every_earlier_run():
    # Pinned: a numpy whose permutations differ would make a resumed run draw other prompts than it would
    # have.
    assert Order(num_prompts=6, per_rollout=6, seed=0, shuffle=True).take(0) == (0, [3, 2, 5, 4, 0, 1])


LEVELS = tuple(n % 3 for n in range(23))


def epoch_of(order, epoch=0):
    count = order.rollouts_per_epoch
    return [n for i in range(count) for n in order.take(epoch * count + i)[1]]


def test_levels_by_hand():
    # 4 and 1 are of level 0, then 3 and 0, then 2; the last rollout is partial and the fifth prompt left out.
    order = Order(num_prompts=5, per_rollout=2, seed=0, shuffle=False, levels=(1, 0, 2, 1, 0))
    assert [order.take(i) for i in range(2)] == [(0, [1, 0]), (0, [3, 2])]


def test_levels_come_in_order_and_are_shuffled_within():
    order = replace(SHUFFLED, levels=LEVELS)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert [LEVELS[n] for n in first] == sorted(LEVELS[n] for n in first)
    assert first != second
    # Within a level prompts stand as they would without any.
    plain = epoch_of(SHUFFLED, 0)
    for level in range(3):
        assert [n for n in first if LEVELS[n] == level] == [n for n in plain if LEVELS[n] == level]


def test_what_an_epoch_leaves_out_is_not_always_of_the_last_level():
    order = replace(SHUFFLED, levels=LEVELS)
    epochs = [set(epoch_of(order, epoch)) for epoch in range(6)]
    assert epochs[0] == set(epoch_of(SHUFFLED, 0))
    assert set().union(*epochs) == set(range(23))
    assert {LEVELS[n] for drawn in epochs for n in set(range(23)) - drawn} == {0, 1, 2}


def test_equal_levels_change_nothing():
    assert epoch_of(replace(SHUFFLED, levels=(1,) * 23)) == epoch_of(SHUFFLED)
