"""The built-in rewards by name, the `format` reward, and the weighted total."""

from __future__ import annotations

import pytest

from covey.rewards.builtin import format_reward, think_format_reward
from covey.rewards.registry import available, build, score_rows, total
from covey.rewards.reward_set import RewardSet
from covey.types import ScorePart, Status


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n<answer>\nc\n</answer>\n", 1.0),
        ("  <think></think> <answer></answer>  ", 1.0),
        ("<think>1 < 2</think><answer><b>3</b></answer>", 1.0),
        ("", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("so: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("<think>a</think> then <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a <answer>b</answer></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<Think>a</Think><Answer>b</Answer>", 0.0),
    ],
)
def test_format(text, value):
    assert format_reward(completions=[text]) == [value]


def test_format_of_a_long_text_takes_no_time():
    # A pattern that backtracks would take minutes on this.
    text = "<think>" + "a <" * 50_000 + "</think>" * 2
    assert format_reward(completions=[text]) == [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think> b", 1.0),
        ("<think>\na\n</think>\nb\nc", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think> b </think>", 1.0),
        ("a", 0.0),
        ("", 0.0),
        ("<think>a", 0.0),
        ("a</think> b", 0.0),
        (" <think>a</think> b", 0.0),
        ("<think>a<think>b</think> c", 0.0),
        ("<think>a</think> b <think>c</think>", 0.0),
    ],
)
def test_think_format(text, value):
    assert think_format_reward(completions=[text]) == [value]


def test_names():
    assert available() == (
        "accuracy",
        "accuracy_reward",
        "code_format",
        "code_reward",
        "format",
        "think_format_reward",
    )
    assert build(["format", "accuracy"]).names == ("format", "accuracy")
    assert build(["trl.rewards.think_format_reward"]).names == ("think_format_reward",)
    for name in ("nonsense", "trl.rewards.accuracy", "trl.rewards.nonsense"):
        with pytest.raises(KeyError):
            build([name])


def test_trls_accuracy_has_its_gold_in_the_column_solution(scored):
    rewards = build(["accuracy_reward"])
    rows = [scored("72", solution="72"), scored("71", solution="72")]
    assert [s.total for s in score_rows(rewards, [1.0], rows)] == [1.0, 0.0]
    (fault,) = rewards.missing(["answer"])
    assert (fault.reward, fault.kind) == ("accuracy_reward", "signature")
    assert "demands solution" in fault.words


def test_a_reward_reads_what_the_prompt_has_opened(scored):
    rows = [
        scored("a</think><answer>b</answer>", opened="<think>"),
        scored("a</think><answer>b</answer>"),
    ]
    assert [s.total for s in score_rows(build(["format"]), [1.0], rows)] == [1.0, 0.0]


# -- total -------------------------------------------------------------------------------------------------


def part(name: str, value: float | None, status: Status = Status.OK, message: str = "") -> ScorePart:
    return ScorePart(name=name, value=value, status=status, message=message)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0], [1.0], 1.0),
        ([1.0, 0.5], [2.0, -1.0], 1.5),
        ([None, 0.5], [2.0, 3.0], 1.5),
        ([1.0, None], [2.0, 3.0], 2.0),
        ([0.0, None], [1.0, 1.0], 0.0),
        ([None, None], [1.0, 1.0], None),
        ([1.0, 5.0], [1.0, 0.0], 1.0),
    ],
)
def test_the_total_is_the_weighted_sum_of_what_spoke(values, weights, expected):
    parts = [part(str(i), v) for i, v in enumerate(values)]
    score = total(parts, weights)
    assert score.total == expected
    assert score.parts == tuple(parts)
    assert score.status is Status.OK


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.INVALID])
def test_a_part_that_failed_makes_the_row_invalid(status):
    score = total([part("a", 1.0), part("judge", None, status, "30 s")], [1.0, 0.0])
    assert (score.total, score.status, score.message) == (None, status, "judge: 30 s")


def test_a_weight_for_every_reward():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        total([part("a", 1.0), part("b", 1.0)], [1.0])


def test_rows_are_scored_by_every_reward(scored):
    rows = [
        scored("<think>x</think><answer>3</answer>", solution="3"),
        scored("3", solution="3"),
        scored("4", solution="3"),
        scored("<think>x</think><answer>3</answer>"),
    ]
    scores = score_rows(build(["accuracy", "format"]), [1.0, 0.5], rows)
    # The last row has no gold: accuracy says nothing of it and format alone speaks.
    assert [s.total for s in scores] == [1.5, 1.0, 0.0, 0.5]
    assert [[p.value for p in s.parts] for s in scores] == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [None, 1.0]]


def test_one_failing_reward_makes_its_rows_invalid_and_no_zero(scored):
    def length(completions):
        return [1.0, 2.0]

    def picky(completions):
        return [1.0 if c == "a" else float("nan") for c in completions]

    with RewardSet.start([length, picky]) as rewards:
        scores = score_rows(rewards, [1.0, 1.0], [scored("a"), scored("b")])
    assert [(s.total, s.status) for s in scores] == [(2.0, Status.OK), (None, Status.INVALID)]
    assert scores[1].parts[0].value == 2.0


def test_a_score_carries_what_was_noted(scored):
    def noting(completions, log_extra):
        log_extra("kind", ["x", "y"])
        return [1.0, None]

    with RewardSet.start([noting]) as rewards:
        scores = score_rows(rewards, [1.0], [scored("a"), scored("b")])
    assert [(s.total, s.extras) for s in scores] == [(1.0, {"kind": "x"}), (None, {"kind": "y"})]


def test_no_rows():
    assert score_rows(build(["accuracy"]), [1.0], []) == []
