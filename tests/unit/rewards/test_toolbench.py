"""`toolbench`: the call of the gold, graded; ms-swift gives 1 or 0, what it gives was found by running it."""

from __future__ import annotations

import json
import random

import pytest

from covey.rewards.toolbench import rouge_l, toolbench

GOLD = 'Thought: x\nAction: search\nAction Input: {"q": "a", "n": 1}'


def call(name: str, given: str) -> str:
    return f"Thought: so\nAction: {name}\nAction Input: {given}"


@pytest.mark.parametrize(
    ("text", "gold", "value", "ms_swift"),
    [
        (GOLD, GOLD, 1.0, 1.0),
        (call("search", '{"n": 1, "q": "a"}'), GOLD, 1.0, 1.0),  # the order of keys is free
        (call("search", '{"q": "b", "n": 1}'), GOLD, 0.75, 0.0),  # (1 + 0.5) of 2, both ways
        (call("search", '{"q": "a"}'), GOLD, 2 / 3, 0.0),  # precision 1, recall 1/2
        (call("search", '{"q": "a", "n": 1, "m": 2, "o": 3}'), GOLD, 2 / 3, 0.0),  # precision 1/2, recall 1
        (call("search", "{}"), GOLD, 0.0, 0.0),
        (call("find", '{"q": "a", "n": 1}'), GOLD, 0.0, 0.0),  # another tool
        (call("search", "a 1"), GOLD, 0.0, 0.0),  # text where JSON is due
        (call("search", '{"q": "a"'), GOLD, 0.0, 0.0),
        ("I would search.", GOLD, 0.0, 0.0),
        ("", GOLD, 0.0, 0.0),
        (f"{call('find', '{}')}\nObservation: 3\n{GOLD}", GOLD, 1.0, 1.0),  # the last call counts
        (f"{GOLD}\nObservation:", GOLD, 1.0, 1.0),
        (f"{GOLD}\nObservation: made up", GOLD, 1.0, 0.0),
        (call("s", "the cat sat"), call("s", "the cat sat on the mat"), 2 * 3 / (3 + 6), 1.0),  # ROUGE-L
        (call("s", "mat"), call("s", "the cat sat on the mat"), 2 * 1 / (1 + 6), 1.0),  # 0.2 is enough there
        (call("s", "dog"), call("s", "the cat sat on the mat"), 0.0, 0.0),
        (call("s", "今天天气好"), call("s", "今天天气很好"), 2 * 5 / (5 + 6), 0.0),  # there: one word
        (call("s", "5"), call("s", "5"), 1.0, 0.0),  # there: JSON that is no object scores 0
        (call("s", "[1,2]"), call("s", "[1, 2]"), 1.0, 0.0),
        ("Action: now", call("now", "{}"), 1.0, 1.0),  # a tool without input
        ("Action: now\nObservation: 12:00", call("now", "{}"), 1.0, 0.0),
        ("hello", "42", None, 1.0),  # a gold that calls no tool; there any text without a call is right
        (GOLD, None, None, None),
        (GOLD, ["x"], None, None),
    ],
)
def test_toolbench(text, gold, value, ms_swift):
    assert toolbench(completions=[text], solution=[gold]) == [
        value if value is None else pytest.approx(value)
    ]


def common_by_table(first: list[str], second: list[str]) -> int:
    """The textbook's table, a cell at a time."""
    rows = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            rows[i + 1][j + 1] = rows[i][j] + 1 if a == b else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


def test_rouge_l_is_that_of_the_textbook():
    draw = random.Random(3)
    for _ in range(200):
        first, second = ([draw.choice("abcd") for _ in range(draw.randint(1, 90))] for _ in range(2))
        expected = 2 * common_by_table(first, second) / (len(first) + len(second))
        assert rouge_l(" ".join(first), " ".join(second)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        # Lin 2004, section 3.1: the summaries S2 and S3 of the reference S1.
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("police killed the gunman", "the gunman kill police", 0.5),
        ("a", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l(gold, text, value):
    assert rouge_l(gold, text) == value


def test_an_input_that_no_parser_ends_is_text():
    deep = "[" * 100_000
    with pytest.raises(RecursionError):
        json.loads(deep)
    assert toolbench(completions=[call("s", deep)], solution=[call("s", "{}")]) == [0.0]
