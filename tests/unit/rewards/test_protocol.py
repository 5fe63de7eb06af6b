"""How a reward function is called, and what becomes of one that fails: a status, never a number."""

from __future__ import annotations

import pytest

from covey.rewards.protocol import FunctionReward
from covey.types import ScorePart, Status


def test_a_function_gets_what_it_names(scored):
    seen = {}

    def reward(completions, solution, *, completion_ids):
        seen.update(completions=completions, solution=solution, completion_ids=completion_ids)
        return [1.0, 0.5]

    rows = [scored("a", ids=(1, 2), solution="3", level=1), scored("b", ids=(4,), solution="5")]
    assert FunctionReward("r", reward).score(rows) == [
        ScorePart(name="r", value=1.0),
        ScorePart(name="r", value=0.5),
    ]
    assert seen == {"completions": ["a", "b"], "solution": ["3", "5"], "completion_ids": [[1, 2], [4]]}


def test_a_function_with_keywords_gets_everything(scored):
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    FunctionReward("r", reward).score([scored("a", prompt="P", solution="3"), scored("b", level=2)])
    assert seen == {
        "prompts": ["P", "Q?"],
        "completions": ["a", "b"],
        "completion_ids": [[1, 2], [1, 2]],
        "level": [None, 2],
        "solution": ["3", None],
    }


def test_a_column_never_takes_the_place_of_what_was_sampled(scored):
    def reward(completions, prompts):
        return [float(c == "a" and p == "Q?") for c, p in zip(completions, prompts, strict=True)]

    rows = [scored("a", completions="gold", prompts="other")]
    assert FunctionReward("r", reward).score(rows) == [ScorePart(name="r", value=1.0)]


def test_a_default_stands_where_the_column_is_missing(scored):
    def reward(completions, solution="default"):
        return [1.0 if solution == "default" else 0.0]

    assert FunctionReward("r", reward).score([scored("a")])[0].value == 1.0
    assert FunctionReward("r", reward).score([scored("a", solution="x")])[0].value == 0.0


def raising(completions):
    raise RuntimeError("no connection")


def failing_parts(function, rows):
    parts = FunctionReward("judge", function).score(rows)
    assert len(parts) == len(rows)
    assert {p.name for p in parts} == {"judge"}
    assert [p.value for p in parts] == [None] * len(rows)
    return parts


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "RuntimeError: no connection"),
        (lambda completions: 1 / 0, "ZeroDivisionError"),
        (lambda completions, solution: [1.0], "TypeError"),  # a column that no row has
        (lambda completions: None, "TypeError"),
        (lambda completions: 1.0, "TypeError"),
        (lambda completions: [], "0 values for 2"),
        (lambda completions: [1.0], "1 values for 2"),
        (lambda completions: [1.0] * 3, "3 values for 2"),
    ],
)
def test_a_call_that_fails_marks_every_row(function, message, scored):
    parts = failing_parts(function, [scored("a"), scored("b")])
    assert {p.status for p in parts} == {Status.ERROR}
    assert all(message in p.message for p in parts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_marks_its_row_alone(bad, scored):
    parts = FunctionReward("r", lambda completions: [1.0, bad]).score([scored("a"), scored("b")])
    assert parts[0] == ScorePart(name="r", value=1.0)
    assert (parts[1].value, parts[1].status) == (None, Status.INVALID)
    assert str(bad) in parts[1].message


@pytest.mark.parametrize("bad", ["good", [1.0], {"score": 1}, object()])
def test_a_value_that_is_no_number_is_a_status_too(bad, scored):
    parts = FunctionReward("r", lambda completions: [1.0, bad]).score([scored("a"), scored("b")])
    assert (parts[1].value, parts[1].status is Status.OK) == (None, False)
    assert parts[1].message


def test_none_is_a_word_and_not_a_failure(scored):
    parts = FunctionReward("r", lambda completions: [None, 2]).score([scored("a"), scored("b")])
    assert parts == [ScorePart(name="r", value=None), ScorePart(name="r", value=2.0)]


def test_values_become_floats(scored):
    numpy = pytest.importorskip("numpy")
    values = [True, 1, numpy.float32(0.5)]
    parts = FunctionReward("r", lambda completions: values).score([scored(t) for t in "abc"])
    assert [p.value for p in parts] == [1.0, 1.0, 0.5]
    assert {type(p.value) for p in parts} == {float}


def test_a_callable_object_is_a_function(scored):
    class Length:
        def __call__(self, completions, **kwargs):
            return [float(len(c)) for c in completions]

    assert FunctionReward("length", Length()).score([scored("abc")])[0].value == 3.0
