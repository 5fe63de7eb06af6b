"""The window of a metric's newest values: what it gives back, and that it takes its room at once."""

from __future__ import annotations

import sys

import pytest

from covey.health.history import Value, Window


def value(number: int) -> Value:
    return Value(step=number, value=number / 4, count=2 * number)


@pytest.mark.parametrize("taken", [1, 7, 199, 200, 201, 260, 400, 615])
def test_the_newest_200_in_order(taken: int) -> None:
    window = Window()
    for number in range(taken):
        window.append(value(number))
    kept = [value(number) for number in range(taken)][-200:]
    assert list(window) == kept and len(window) == len(kept)
    assert list(reversed(window)) == kept[::-1]
    assert [window[i] for i in range(-len(kept), 0)] == kept
    assert list(window.numbers()) == [v.value for v in kept]
    assert list(window.numbers(5)) == [v.value for v in kept[-5:]]
    assert list(Window(kept)) == kept


def test_it_is_empty_at_first_and_ends_where_its_values_do() -> None:
    window = Window()
    assert not window and list(window) == [] and list(window.numbers()) == []
    window.append(value(3))
    for index in (1, -2):
        with pytest.raises(IndexError):
            window[index]


def test_it_does_not_grow() -> None:
    window = Window()
    before = sys.getsizeof(window._packed)
    for number in range(500):
        window.append(value(number))
    assert sys.getsizeof(window._packed) == before >= 200 * 3 * 8
