"""Golds that are lists and objects: their texts, which lists are alternatives, and which may be parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from covey.rewards.accuracy import accuracy, reasoning_accuracy
from covey.rewards.builtin import BUILT_IN
from covey.rewards.gold_lists import ColumnLists, names_alternatives
from covey.rewards.gold_texts import UnreadableGold, gold_texts, has_several
from covey.rewards.golds import check_golds
from covey.rewards.lengths import cosine

PAIRS: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [
    ("5", ("5",), ("5",)),
    (5, ("5",), ("5",)),
    ('["A", "C"]', ('["A", "C"]',), ('["A", "C"]',)),
    (["A", "C"], ("A", "C"), ("A, C",)),
    (("A", "C"), ("A", "C"), ("A, C",)),
    (np.array(["A", "C"]), ("A", "C"), ("A, C",)),
    (["A", "A"], ("A",), ("A, A",)),
    (["A"], ("A",), ("A",)),
    ([["A", "C"], "B"], ("A, C", "B"), ("A, C, B",)),
    ([["A", "C"]], ("A, C",), ("A, C",)),
    ({"target": ["A", "C"]}, ("A", "C"), ("A, C",)),
    ({"style": "rule", "ground_truth": {"target": "A"}}, ("A",), ("A",)),
    ({"Answer": "A", "answer_id": 3}, ("A",), ("A",)),
    ({"target": "", "answer": "A"}, ("A",), ("A",)),
    ({"value": "A", "aliases": ["B", "C"]}, ("A", "B", "C"), ("A", "B", "C")),
    ({"aliases": ["B", "C"]}, ("B", "C"), ("B", "C")),
    ({"text": ["A", "C", "A"], "answer_start": [1, 2, 1]}, ("A", "C"), ("A", "C")),
    ({"text": np.array(["A"]), "answer_start": np.array([1])}, ("A",), ("A",)),
    ([{"answer": "A"}, {"answer": ["B", "C"]}], ("A", "B", "C"), ("A, B, C",)),
    ([{"value": "A", "aliases": ["a"]}, "B"], ("A", "a", "B"), ("A, B", "a, B")),
    ([r"\boxed{1}", "so #### 2"], (r"\boxed{1}", "so #### 2"), ("1, 2",)),
    ({"answer": 0}, ("0",), ("0",)),
]


@pytest.mark.parametrize(("gold", "alternatives", "parts"), PAIRS)
def test_the_texts_of_a_gold(gold: Any, alternatives: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert gold_texts(gold) == gold_texts(gold, "any") == alternatives
    assert gold_texts(gold, "all") == parts


def test_what_is_no_gold_says_why() -> None:
    deep: Any = "5"
    for _ in range(5000):
        deep = {"answer": deep}
    for gold, words in (
        ([], "an empty list"),
        ([None], "an empty list"),
        ({}, "an empty object"),
        ({"answer": None}, "whose answer is empty"),
        ({"text": ["A"], "label": [1]}, "with the keys text, label;"),
        ({"label": "A"}, "target, ground_truth, answer, value, aliases"),
        ([{"label": "A"}, {"score": 1}], "with the keys score"),
        (deep, "too deeply"),
    ):
        with pytest.raises(UnreadableGold, match=words):
            gold_texts(gold)
        assert accuracy(completions=["<answer>A</answer>"], solution=[gold]) == [None]
        ((row, _, why),) = check_golds([gold]).bad
        assert row == 0 and words in why
    with pytest.raises(UnreadableGold, match="a part of it is missing"):
        gold_texts(["A", None], "all")


def test_of_alternatives_one_that_can_be_read_is_enough() -> None:
    golds: list[Any] = [["", "7"], ["?!", r"\frac{1}{"], [{"label": 1}, "7"], [r"\int x", "7"], [r"\int x"]]
    assert accuracy(completions=["7"] * 5, solution=golds) == [1.0, None, 1.0, 1.0, None]
    assert accuracy(completions=["8"] * 5, solution=golds) == [0.0, None, 0.0, 0.0, None]
    report = check_golds(golds)
    assert (report.num_golds, report.num_checked) == (5, 5)
    assert [(row, text) for row, text, _ in report.bad] == [(1, r'["?!", "\\frac{1}{"]'), (4, r'["\\int x"]')]
    # As parts of one answer they all have to be read.
    assert [row for row, _, _ in check_golds(golds, lists="all").bad] == [0, 1, 2, 3, 4]


def test_each_row_has_the_gold_that_it_has() -> None:
    given = accuracy(
        completions=["1", "2", "3"], solution=["1", None, None], answer=["9", ["2", "two"], None]
    )
    assert given == [1.0, 1.0, None]


def test_how_the_answer_of_an_alternative_was_found() -> None:
    told: list[Any] = []
    accuracy(
        completions=["It is called Rome.", "In all 12.", r"\boxed{Roma}", "none"],
        solution=[["753", "Rome"], ["Rome", "12"], ["Rome", "Roma"], ["Rome"]],
        log_extra=lambda column, values: told.extend(values),
    )
    assert told == ["last_words", "last_expression", "boxed", "last_words"]


READERS = tuple(name for name, found in BUILT_IN.items() if found.parses_gold)


def test_every_reward_that_reads_golds_reads_lists_alike() -> None:
    assert {name for name in BUILT_IN if "gold_lists" in BUILT_IN[name].options} == set(READERS)
    golds, completions = [["A", "C"]] * 3, ["</think>A", "</think>A, C", "</think>B"]
    for lists, scores in (("any", [1.0, 0.0, 0.0]), ("all", [0.0, 1.0, 0.0]), (None, [1.0, 0.0, 0.0])):
        given = {"completions": completions, "solution": golds, "gold_lists": lists}
        assert accuracy(**given) == reasoning_accuracy(**given) == scores
        lengths = {f"cosine_{end}_len_value_{kind}": float(kind == "correct") for end in ("min", "max")
                   for kind in ("correct", "wrong")}  # fmt: skip
        assert cosine(**given, completion_ids=[[1]] * 3, cosine_max_len=9, **lengths) == scores


@pytest.mark.parametrize(
    ("lists", "is_decided"),
    [
        ([["Paris", "paris", "City of Paris"]], True),
        ([["1/2", "0.5"], ["3", "3.0"]], True),
        ([[r"\sqrt{8}", r"2\sqrt{2}"]], True),
        ([["1969", "nineteen sixty-nine"]], True),
        ([["上海", "沪"]], True),
        ([["A"], ["C"], "B", 3, None], True),
        ([["2", "2"]], True),
        ([["A", "C"], ["B", "D"]], False),
        ([["(A)", "(C) 12"]], False),
        ([["A. Paris", "C. Rome"]], False),
        ([["1", "2"]], False),
        ([["5 km", "7 km"]], False),
        ([["x", "y"]], False),
        ([["3:4", "1:2"]], False),
        ([[r"\sqrt{2}", r"\sqrt{3}"]], False),
        ([{"target": ["1", "2"]}], False),
        ([[["1", "2"], ["3", "4"]]], False),
        # By the names of their keys these are alternatives, whatever they hold.
        ([{"value": "1", "aliases": ["2"]}, {"text": ["1", "2"], "answer_start": [3, 4]}], True),
        # A column is one thing: most of its lists decide.
        ([["1969", "1970"], ["Paris", "paris"], ["Rome", "Roma"]], True),
        ([["A", "C"], ["B", "D"], ["none", "all"]], False),
    ],
)
def test_which_lists_are_alternatives(lists: list[Any], is_decided: bool) -> None:
    column = ColumnLists()
    for row, gold in enumerate(lists):
        column.add(row, gold)
    assert column.is_decided is is_decided
    assert (column.first_open is None) == (column.num_open == 0)
    assert column.num_lists == column.num_open + column.num_shown == sum(map(has_several, lists))
    if not is_decided:
        assert column.first_open == (0, lists[0])


def test_formulas_are_compared_in_few_lists_and_the_others_decide_nothing() -> None:
    column = ColumnLists()
    for n in range(200):
        column.add(n, [rf"\sqrt{{{n}}}+x", rf"x+\sqrt{{{n}}}"])
    assert (column.num_lists, column.num_open, column.is_decided) == (200, 0, True)
    assert 0 < column.num_shown < 50


def test_the_names_of_columns_of_alternatives() -> None:
    names = ("golden_answers", "aliases", "targets", "Golden Answers", "solution", "answers", "target")
    assert [names_alternatives(name) for name in names] == [True] * 4 + [False] * 3
