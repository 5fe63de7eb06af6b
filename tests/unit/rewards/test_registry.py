"""The built-in rewards by name, the `format` reward, and the weighted total."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.options.schema import OPTIONS as CONFIG
from covey.rewards.builtin import BUILT_IN, JUDGE_OPTIONS
from covey.rewards.formats import format_reward, think_format_reward
from covey.rewards.registry import available, build, metric_names, options_read, score_rows, total
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
    assert build(["format", "accuracy"]).names == ("format", "accuracy")
    assert build(["trl.rewards.think_format_reward"]).names == ("think_format_reward",)
    overlong = build(["trl.rewards.get_soft_overlong_punishment"], OPTIONS)
    assert overlong.names == ("get_soft_overlong_punishment",)
    for name in ("nonsense", "trl.rewards.accuracy", "trl.rewards.cosine", "trl.rewards.nonsense", "cosine"):
        with pytest.raises(KeyError):
            build([name])


OPTIONS = {
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": 4,
    "repetition_n_grams": 1,
    "repetition_max_penalty": -2.0,
    "soft_max_length": 4,
    "soft_cache_length": 4,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 1.0),
        ("cosine", 0.75),  # 2 tokens of 4
        ("format", 1.0),
        ("get_cosine_scaled_reward", 0.75),
        ("get_repetition_penalty_reward", -1.0),  # 7 7
        ("get_soft_overlong_punishment", -0.5),
        ("json_valid", 0.0),
        ("react_format", 0.0),
        ("reasoning_accuracy", 1.0),
        ("repetition", -2 * 1 / 5),  # 4 different of 5 words
        ("soft_overlong", -0.5),
        ("tag_count", 1.0),
        ("toolbench", None),
        ("xml_valid", 0.0),
    ],
)
def test_each_name_is_its_own_reward_and_reads_the_options_of_the_run(name, value, scored):
    row = scored("<think> a a </think> <answer>5</answer>", ids=(7, 7), solution="5")
    assert [s.total for s in score_rows(build([name], OPTIONS), [1.0], [row])] == [
        value if value is None else pytest.approx(value)
    ]


def test_the_page_has_every_built_in_with_what_it_reads():
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("| name | value | reads | for |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    names = [row[0].strip("` ") for row in rows]
    assert sorted(names) == sorted(available())
    read = {name: re.findall(r"`(\w+)`", row[2]) for name, row in zip(names, rows, strict=True)}
    assert sorted(read.pop("judge")) == sorted(JUDGE_OPTIONS)
    assert read.pop("code_reward") == ["verification_info", "test_cases"]
    for name, words in read.items():
        others = {o for w in words if w in BUILT_IN for o in BUILT_IN[w].options}
        assert {*words, *others} - {*BUILT_IN} == {*BUILT_IN[name].golds, *BUILT_IN[name].options}, name
    values = page.partition("| option | here | TRL | ms-swift |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", values, re.MULTILINE)) == sorted(OPTIONS)


def test_every_option_that_a_reward_reads_is_one_of_the_run():
    read = {o for of_one in options_read().values() for o in of_one}
    assert read == {*OPTIONS, "gold_lists", *JUDGE_OPTIONS} <= set(CONFIG)


def test_a_column_never_takes_the_place_of_an_option(scored):
    row = scored("a", ids=(1, 2), soft_max_length=99, soft_cache_length=1)
    assert [s.total for s in score_rows(build(["soft_overlong"], OPTIONS), [1.0], [row])] == [-0.5]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"])
def test_trls_rewards_have_their_gold_in_the_column_solution(name, scored):
    rewards = build([name], OPTIONS)
    rows = [scored("</think>72", answer="72"), scored("</think>72", solution="72", answer="1")]
    assert [s.total is None for s in score_rows(rewards, [1.0], rows)] == [True, False]
    assert [f.kind for f in rewards.missing(["answer"])] == ["signature"]
    assert rewards.missing(["solution"]) == []


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


def test_names_of_metrics_without_loading_anything():
    """As they are where everything is loaded: by these a replay finds the weight of each reward."""
    entries = ["trl.rewards.accuracy_reward", "a.py:kind", "pkg.b:kind", "me/rm", "ms::you/rm", "code_reward"]
    assert metric_names(entries) == ("accuracy_reward", "a.kind", "b.kind", "me.rm", "you.rm", "code_reward")
    assert metric_names(["a.py:kind", "orm_of_a_plugin"]) == ("kind", "orm_of_a_plugin")
