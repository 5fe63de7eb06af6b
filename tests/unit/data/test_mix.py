"""Several sources made one, rows held out, columns renamed."""

from __future__ import annotations

import pytest

from covey.data.errors import DataError
from covey.data.mix import mix, rename_columns, split_rows


def rows(name, number):
    return [{"id": f"{name}{i}"} for i in range(number)]


A, B = rows("a", 30), rows("b", 1000)


def test_sources_follow_each_other():
    assert mix([A, B], seed=0) == A + B


def test_interleaving_stops_with_the_first_source_used_up_and_keeps_each_order():
    mixed = mix([A, B], seed=3, interleave_prob=[0.25, 0.75])
    assert [r for r in mixed if r["id"][0] == "a"] == A
    from_b = [r for r in mixed if r["id"][0] == "b"]
    assert from_b == B[: len(from_b)]
    assert mixed[-1] == A[-1]
    # 30 of the first mean 90 of the second, give or take four standard deviations (11 each).
    assert 46 <= len(from_b) <= 134


def test_interleaving_is_a_function_of_the_seed():
    def drawn(seed):
        return mix([A, B], seed=seed, interleave_prob=[0.5, 0.5])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_probabilities_of_zero_and_one():
    assert mix([A, B], seed=0, interleave_prob=[1, 0]) == A
    assert mix([A, B], seed=0, interleave_prob=[0, 1]) == B
    assert mix([A, []], seed=0, interleave_prob=[0.5, 0.5]) == []


@pytest.mark.parametrize(
    ("probabilities", "words"),
    [
        ([1.0], "1 values for 2 data sets"),
        ([0.5, 0.6], "must sum to 1, not 1.1"),
        ([1.5, -0.5], "from 0 to 1"),
        ([float("nan"), 1.0], "from 0 to 1"),
        ([0.5, 0.500002], "must sum to 1, not"),
    ],
)
def test_probabilities_that_are_none(probabilities, words):
    with pytest.raises(DataError, match=words):
        mix([A, B], seed=0, interleave_prob=probabilities)


def test_a_split_is_disjoint_complete_and_in_order():
    train, held = split_rows(B, 0.1, seed=5)
    assert len(held) == 100
    assert sorted([*train, *held], key=lambda r: int(r["id"][1:])) == B
    assert train == [r for r in B if r in train]
    assert held != B[:100]
    assert split_rows(B, 0.1, seed=5) == (train, held)
    assert split_rows(B, 0.1, seed=6)[1] != held


def test_the_ends_of_a_split():
    assert split_rows(A, 0, seed=0) == (A, [])
    assert [len(part) for part in split_rows(A, 0.001, seed=0)] == [29, 1]
    assert len(split_rows(rows("c", 3), 0.9, seed=0)[0]) == 1
    with pytest.raises(DataError, match="none of the 1 rows"):
        split_rows(A[:1], 0.5, seed=0)
    with pytest.raises(DataError, match="share from 0 to below 1"):
        split_rows(A, 1.0, seed=0)


def test_columns_are_renamed():
    before = [{"q": "1+1", "a": "2"}, {"q": "1+2"}]
    assert rename_columns(before, {"q": "prompt", "a": "solution"}) == [
        {"prompt": "1+1", "solution": "2"},
        {"prompt": "1+2"},
    ]
    assert before == [{"q": "1+1", "a": "2"}, {"q": "1+2"}]
    assert rename_columns([{"a": 1, "b": 2}], {"a": "b", "b": "a"}) == [{"b": 1, "a": 2}]
    assert rename_columns(before, {"q": "q"}) == before
    # Sources that follow each other may each bring one of the two names.
    assert rename_columns([{"a": 1}, {"b": 2}, {"a": None, "b": 3}], {"a": "b"}) == [
        {"b": 1},
        {"b": 2},
        {"b": 3},
    ]


def test_a_column_that_nobody_has_is_named_with_those_there_are():
    said = r"'anser', but no row has this column \(nearest: answer\).*answer, question"
    with pytest.raises(DataError, match=said):
        rename_columns([{"question": 1, "answer": 2}], {"anser": "solution"})


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(DataError, match="two columns of row 1 the name 'b'"):
        rename_columns([{"a": 1, "b": 2}], {"a": "b"})


@pytest.mark.parametrize(
    ("row", "typed", "works"),
    [
        # The column that has the name already gets another one, which is free.
        ({"a": 1, "b": 2}, {"a": "b"}, {"a": "b", "b": "unused_b"}),
        ({"a": 1, "b": 2, "unused_b": 3}, {"a": "b"}, {"a": "b", "b": "unused_unused_b"}),
        ({"a": 1, "b": 2, "c": 3}, {"c": "q", "a": "b"}, {"c": "q", "a": "b", "b": "unused_b"}),
        # Of two that are given one name the first has it.
        ({"a": 1, "b": 2}, {"a": "c", "b": "c"}, {"a": "c"}),
        ({"aa": 1, "b": 2}, {"aaa": "b"}, {"aa": "b", "b": "unused_b"}),
        ({"question": 1, "answer": 2}, {"anser": "solution"}, {"answer": "solution"}),
        ({"question": 1, "answer": 2}, {"xyz": "solution"}, None),
    ],
)  # fmt: skip
def test_names_that_work_are_named(row, typed, works):
    with pytest.raises(DataError) as error:
        rename_columns([row, row], typed)
    assert error.value.columns == works
    if works is not None:
        (renamed, _) = rename_columns([row, row], works)
        assert sorted(renamed.values()) == sorted(row.values())
