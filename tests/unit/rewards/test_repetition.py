"""`repetition` by words and characters, and TRL's `get_repetition_penalty_reward` by tokens.

The value is (1 - different n-grams / n-grams) x penalty (arXiv 2502.03373, C.2). Numbers are counted by
hand; what ms-swift gives was found by running it.
"""

from __future__ import annotations

import pytest

from covey.rewards.repetition import repeated_share, repetition, repetition_of_tokens
from covey.rewards.units import units


def of(text: str, n: int = 3, penalty: float = -1.0) -> float | None:
    (value,) = repetition(completions=[text], repetition_n_grams=n, repetition_max_penalty=penalty)
    return value


@pytest.mark.parametrize(
    ("text", "value", "ms_swift"),
    [
        ("", 0.0, 0.0),
        ("a b", 0.0, 0.0),  # no 3-gram
        ("a b c", 0.0, 0.0),
        ("a b c a b c", -1 / 4, -1 / 4),  # abc bca cab abc
        ("A b a B a b", -2 / 4, -2 / 4),  # small letters: aba bab aba bab
        ("the cat the cat the cat the cat", -4 / 6, -4 / 6),
        ("a b c\na  b\tc", -1 / 4, -1 / 4),  # any white space
        ("我爱你我爱你我爱你", -4 / 7, 0.0),  # 7 of 我爱你 爱你我 你我爱; ms-swift sees one word
        ("我爱你 我爱你 我爱你", -4 / 7, 0.0),
        ("今天天气很好", 0.0, 0.0),
        ("ありがとうありがとう", -3 / 8, 0.0),  # Japanese: 5 different of 8
        ("ดีดีดีดี", -4 / 6, 0.0),  # Thai: ดีด and ีดี
        ("네 네 네 네 네", -2 / 3, -2 / 3),  # Korean has spaces
        ("ok ok ok 好好好好", -1 / 5, 0.0),  # ok ok ok 好 好 好 好: 好好好 twice
        ("hello，hello，hello，", -2 / 4, 0.0),  # Chinese commas part words
    ],
)
def test_words_and_characters(text, value, ms_swift):
    assert of(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Das ist 你好, ok", ["das", "ist", "你", "好", ",", "ok"]),
        ("今天30度。", ["今", "天", "30", "度", "。"]),
        ("カタカナ and ﾊﾝｶｸ", [*"カタカナ", "and", *"ﾊﾝｶｸ"]),
        ("한국어 말", ["한국어", "말"]),
        ("ສະບາຍ", list("ສະບາຍ")),
        ("ខ្មែរ", list("ខ្មែរ")),
        ("𠀀𠀁 x", ["𠀀", "𠀁", "x"]),
        ("\u3000a\u00a0b ", ["a", "b"]),  # wide and hard spaces are spaces
        ("", []),
    ],
)
def test_units(text, expected):
    assert units(text) == expected


@pytest.mark.parametrize(
    ("ids", "n", "value"),
    [
        ([1, 2, 3, 4], 2, 0.0),  # the example of TRL
        ([5, 5, 5, 5, 5], 2, -3 / 4),  # the example of TRL
        ([1, 2, 3, 1, 2, 3], 3, -1 / 4),
        ([7] * 4, 3, -1 / 2),
        ([7, 7], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_tokens(ids, n, value):
    said = repetition_of_tokens(completion_ids=[ids], repetition_n_grams=n, repetition_max_penalty=-1.0)
    assert said == pytest.approx([value], rel=1e-12)


def test_nothing_repeated_is_a_plain_zero():
    assert str(of("a b c d")) == "0.0"  # -0.0 in ms-swift


def test_the_worst_case_comes_close_to_the_penalty():
    assert repeated_share("aaaa", 3) == 0.5
    assert of("again " * 1002) == pytest.approx(-999 / 1000)
