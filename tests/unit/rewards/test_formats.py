"""`react_format` and `tag_count`; the cases of `format` and `think_format_reward` are in test_registry.py.

ms-swift looks for `</think>`, then `Action:`, then `Action Input:`, whatever stands between them;
what it says of a case was found by running it.
"""

from __future__ import annotations

import pytest

from covey.rewards.formats import react_format, tag_count

THOUGHT = "<think>a</think>"


@pytest.mark.parametrize(
    ("text", "value", "ms_swift"),
    [
        (f'{THOUGHT}\nAction: search\nAction Input: {{"q": "a"}}', 1.0, 1.0),
        (f"{THOUGHT} Action: search Action Input: a\nb", 1.0, 1.0),
        (f"{THOUGHT}\nAction: search\nAction Input: a\nObservation: b\nAction: c\nAction Input: d", 1.0, 1.0),
        (f" {THOUGHT}\nAction: search\nAction Input:", 1.0, 0.0),  # white space in front, as in `format`
        (f"{THOUGHT} Action:Action Input:", 0.0, 1.0),  # ms-swift: an action without a name
        (f"{THOUGHT} so {THOUGHT}Action: a Action Input: b", 0.0, 1.0),  # ms-swift: two thoughts
        (f"{THOUGHT} so </think> Action: a Action Input: b", 0.0, 1.0),  # ms-swift: closed twice
        (f"{THOUGHT}\nAction: a\nAction Input: b <think>c</think>", 0.0, 1.0),
        (f"{THOUGHT} so Action: a\nAction Input: b", 0.0, 0.0),
        (f"{THOUGHT}\nAction: a", 0.0, 0.0),
        (f"{THOUGHT}\nAction Input: b\nAction: a", 0.0, 0.0),
        (f"well\n{THOUGHT}\nAction: a\nAction Input: b", 0.0, 0.0),
        ("Action: a\nAction Input: b", 0.0, 0.0),
        ("<think>a\nAction: a\nAction Input: b", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_react_format(text, value, ms_swift):
    assert react_format(completions=[text]) == [value]


def test_react_format_of_a_long_text_takes_no_time():
    # A pattern that backtracks would take minutes on this.
    text = THOUGHT + "Action: " + "a Action " * 20_000
    assert react_format(completions=[text, THOUGHT * 20_000]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1.0),  # open-r1 asks for these line breaks
        ("</answer><answer></think><think>", 1.0),  # order is the business of `format`
        ("<think>a</think> b", 0.5),
        ("<think>a<think>b</think><answer>c</answer>", 0.75),
        ("<think>a</think><answer>b", 0.75),
        ("<answer>b</answer><answer>b</answer>", 0.0),
        ("<Think>a</Think>", 0.0),
        ("", 0.0),
    ],
)
def test_tag_count(text, value):
    assert tag_count(completions=[text]) == [value]
