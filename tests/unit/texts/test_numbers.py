"""Numbers are told with as many digits as tell them apart."""

from __future__ import annotations

import math

import pytest

from covey.texts.numbers import told


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.05, 0.7), ("0.05", "0.7")),
        ((0.5, 0.5), ("0.5", "0.5")),
        ((1000.2, 1001.4), ("1000.2", "1001.4")),
        ((1000.0, 1000.0), ("1000", "1000")),
        ((-1000.25, -1000.5), ("-1000.25", "-1000.5")),
        ((123456.0, 123456.5), ("123456", "123456.5")),
        ((math.nan, 0.5), ("nan", "0.5")),
        ((0.0, 0.0), ("0", "0")),
    ],
)
def test_what_is_told(values: tuple[float, ...], texts: tuple[str, ...]) -> None:
    assert told(*values) == texts
