"""`soft_overlong` and `cosine`, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from covey.rewards.lengths import cosine, soft_overlong


def tokens(*lengths: int) -> list[list[int]]:
    return [[0] * n for n in lengths]


def overlong(length: int, longest: int = 100, zone: int = 20) -> float | None:
    (value,) = soft_overlong(completion_ids=tokens(length), soft_max_length=longest, soft_cache_length=zone)
    return value


@pytest.mark.parametrize(
    ("length", "value", "ms_swift"),
    [
        (0, 0.0, 0.0),
        (79, 0.0, 0.0),
        (80, 0.0, 0.0),  # DAPO's equation 13: 0 up to and with L_max - L_cache
        (81, -1 / 20, -1 / 20),
        (90, -1 / 2, -1 / 2),  # the example of TRL
        (99, -19 / 20, -19 / 20),
        (100, -1.0, -1.0),
        (101, -1.0, -21 / 20),  # ms-swift has no floor
        (140, -1.0, -3.0),
    ],
)
def test_soft_overlong(length, value, ms_swift):
    assert overlong(length) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("length", "value"), [(99, 0.0), (100, 0.0), (101, -1.0), (200, -1.0)])
def test_soft_overlong_without_a_zone_is_a_step(length, value):
    """As in TRL; ms-swift divides by 0."""
    assert overlong(length, zone=0) == value


ENDS = {
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": 100,
}
TRLS = ENDS | {"cosine_min_len_value_wrong": -1.0, "cosine_max_len_value_wrong": -0.5}
RIGHT, WRONG = r"So \boxed{5}", r"So \boxed{4}"


def scaled(text: str, length: int, gold: object = "5", **changes: float) -> float | None:
    (value,) = cosine(
        completions=[text], completion_ids=tokens(length), solution=[gold], **{**ENDS, **changes}
    )
    return value


@pytest.mark.parametrize(
    ("text", "length", "value"),
    [
        (RIGHT, 0, 1.0),
        (RIGHT, 50, 0.75),  # cos(pi/2) = 0: half way
        (RIGHT, 100, 0.5),
        (RIGHT, 25, 0.5 + 0.25 * (1 + math.sqrt(0.5))),
        (WRONG, 0, -0.5),
        (WRONG, 50, -0.25),
        (WRONG, 75, -0.25 * (1 - math.sqrt(0.5))),
        (WRONG, 100, 0.0),
        ("no idea", 100, 0.0),
        # Past the end ms-swift's cosine turns back: 0.75 for the first of these, -0.5 for the second.
        (RIGHT, 150, 0.5),
        (WRONG, 200, 0.0),
    ],
)
def test_cosine(text, length, value):
    assert scaled(text, length) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("text", "value"), [(RIGHT, 0.75), (WRONG, -0.75)])
def test_cosine_with_the_numbers_of_trl(text, value):
    """The example of TRL: 50 tokens of 100."""
    assert scaled(text, 50, **TRLS) == pytest.approx(value)


@pytest.mark.parametrize("gold", ["", r"\frac{1}{", None])
def test_a_gold_that_cannot_be_read_is_no_wrong_answer(gold):
    """ms-swift scores such a row as a wrong answer, by its length."""
    assert scaled(WRONG, 50, gold) is None
    assert scaled(RIGHT, 50, gold) is None


def test_no_gold_column():
    assert cosine(completions=[RIGHT], completion_ids=tokens(3), **ENDS) == [None]


def test_the_column_answer_is_a_gold_too():
    assert cosine(completions=[RIGHT], completion_ids=tokens(100), answer=["5"], **ENDS) == [0.5]
