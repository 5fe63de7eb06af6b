"""Rows that a program holds are those that it would have saved, under a name that tells them from others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pandas
import pytest

from covey.config.objects import is_live, is_stream
from covey.data.errors import DataError
from covey.data.live import live_rows
from covey.data.sources import eval_name, parse_source, stream_rows

ROWS = [{"question": f"What is {n}+1?", "solution": str(n + 1)} for n in range(5)]


def numbered() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize(
    "value",
    [
        ROWS,
        tuple(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list([*ROWS, *ROWS]).select(range(5)),
        datasets.Dataset.from_list(ROWS).with_format("pandas"),
        datasets.Dataset.from_list(ROWS).with_format("arrow"),
        pandas.DataFrame(ROWS, index=range(7, 12)),
    ],
)
def test_the_same_rows_have_the_same_name(value: Any) -> None:
    found = live_rows(value)
    assert found.rows == list(found.read()) == list(found.read()) == ROWS
    assert found.name == live_rows(ROWS).name and found.name.startswith("object 5 rows (checksum ")
    assert is_live(found.name) and not is_stream(found.name)


def test_other_rows_have_another_name() -> None:
    others = [[*ROWS[:-1], {**ROWS[-1], "solution": "6"}], ROWS[::-1], ROWS[:-1]]
    assert len({live_rows(rows).name for rows in (ROWS, *others)}) == 4
    # A dataset's cell without a value and a DataFrame's are both None, and no number.
    empty = live_rows(pandas.DataFrame([{"question": "a", "solution": 1.5}, {"question": "b"}]))
    assert empty.rows is not None and empty.rows[1]["solution"] is None


def test_a_column_of_several_types_is_no_table() -> None:
    with pytest.raises(DataError, match="cannot be converted to a table"):
        live_rows(pandas.DataFrame([{"question": 3}, {"question": "x"}]))


def test_the_format_of_a_stream_is_left_aside() -> None:
    found = live_rows(datasets.IterableDataset.from_generator(numbered).with_format("numpy"))
    assert list(found.read()) == ROWS and type(next(iter(found.read()))["question"]) is str


def test_a_stream_is_read_anew_each_time() -> None:
    found = live_rows(datasets.IterableDataset.from_generator(numbered))
    assert found.rows is None and is_stream(found.name)
    assert list(found.read()) == list(found.read()) == ROWS
    source = parse_source(f"sums={found.name}")
    assert (source.hub, source.path, source.name) == ("object", found.name, "sums")
    assert eval_name(source) == "sums" and eval_name(parse_source(found.name)) == "rows"
    assert list(stream_rows([source], use_hf=True, live={found.name: found})()) == ROWS


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "is of type int"),
        ({"question": ["a"]}, "is of type dict"),
        ([ROWS[0], "What is 1+1?"], "a str at position 1"),
        ([{1: "a"}], "column name 1 is not text"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "with the splits train"),
    ],
)
def test_what_holds_no_rows(value: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        live_rows(value)
