"""`reasoning_accuracy`: the answer counts only behind the end of the thoughts. Three cases are TRL's."""

from __future__ import annotations

import pytest

from covey.rewards.accuracy import accuracy, reasoning_accuracy

BOX = r"\boxed{\frac{1}{3}}"


@pytest.mark.parametrize(
    ("text", "gold", "value", "plain"),
    [
        (rf"<think>a</think> The final answer is {BOX}", r"\frac{1}{3}", 1.0, 1.0),
        (r"<think>a</think> The final answer is \boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0, 0.0),
        (rf"<think>partial {BOX} but no final answer", r"\frac{1}{3}", 0.0, 1.0),
        ("<think>72</think> I do not know", "72", 0.0, 0.0),  # in thoughts only marks count
        (f"<think>a</think> {BOX} </think> I cannot tell", r"\frac{1}{3}", 0.0, 1.0),  # the last end counts
        ("<think>71</think><answer>72</answer>", "72", 1.0, 1.0),
        ("a</think>72", "72", 1.0, 1.0),  # a prompt that ends with <think>
        ("", "72", 0.0, 0.0),
        ("<think>a</think>72", "", None, None),  # a gold that cannot be read
        ("<think>a", r"\frac{1}{", None, None),  # TRL: 0, it looks at the thoughts first
        ("<think>a</think>72", None, None, None),
    ],
)
def test_reasoning_accuracy(text, gold, value, plain):
    assert reasoning_accuracy(completions=[text], solution=[gold]) == [value]
    assert accuracy(completions=[text], solution=[gold]) == [plain]


def test_columns_and_notes():
    noted = {}
    said = reasoning_accuracy(completions=["<think>1</think>2"], answer=["2"], log_extra=noted.__setitem__)
    assert (said, noted) == ([1.0], {"parsed_by": ["last_expression"]})
    assert reasoning_accuracy(completions=["</think>2"]) == [None]
