"""Every type of Arrow: a column is what JSON has, and the same again when a record is read back."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covey.data.errors import DataError
from covey.data.rows import prompt_table
from covey.data.sources import load_source, parse_source, stream_rows
from covey.rollout.records import prompt_of, to_record
from covey.telemetry.jsonl import encode
from covey.types import Origin, Score
from support.groups import episode

WHEN = dt.datetime(2020, 1, 2, 3, 4, 5, 600000)
BERLIN = "Europe/Berlin"
CENT = decimal.Decimal("12.50")
ADD = [{"name": "add", "when": WHEN.date()}]

COLUMNS = {
    "bool": (pa.array([True]), True),
    "int8": (pa.array([-7], pa.int8()), -7),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "float16": (pa.array([np.float16(1.5)], pa.float16()), 1.5),
    "float32": (pa.array([0.1], pa.float32()), float(np.float32(0.1))),
    "float64": (pa.array([0.1]), 0.1),
    "infinity": (pa.array([-math.inf]), -math.inf),
    "null": (pa.nulls(1), None),
    "string": (pa.array(["ä"]), "ä"),
    "large_string": (pa.array(["ä"], pa.large_string()), "ä"),
    "string_view": (pa.array(["ä"], pa.string_view()), "ä"),
    "dictionary": (pa.array(["ä"]).dictionary_encode(), "ä"),
    "timestamp_s": (pa.array([WHEN.replace(microsecond=0)], pa.timestamp("s")), "2020-01-02T03:04:05"),
    "timestamp_us": (pa.array([WHEN], pa.timestamp("us")), "2020-01-02T03:04:05.600000"),
    "timestamp_ns": (pa.array([1577934245123456789], pa.timestamp("ns")), "2020-01-02T03:04:05.123456789"),
    "timestamp_tz": (pa.array([WHEN], pa.timestamp("us", BERLIN)), "2020-01-02T04:04:05.600000+01:00"),
    "date32": (pa.array([WHEN.date()], pa.date32()), "2020-01-02"),
    "date64": (pa.array([WHEN.date()], pa.date64()), "2020-01-02"),
    "time32": (pa.array([dt.time(1, 2, 3)], pa.time32("s")), "01:02:03"),
    "time64": (pa.array([dt.time(1, 2, 3, 4)], pa.time64("us")), "01:02:03.000004"),
    "duration_s": (pa.array([dt.timedelta(minutes=2)], pa.duration("s")), 120),
    "duration_ns": (pa.array([1_500_000_001], pa.duration("ns")), 1.500000001),
    "decimal128": (pa.array([CENT], pa.decimal128(5, 2)), "12.50"),
    "decimal256": (pa.array([CENT], pa.decimal256(50, 2)), "12.50"),
    "list": (pa.array([[1, 2]]), [1, 2]),
    "fixed_list": (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [1, 2]),
    "large_list": (pa.array([[1, 2]], pa.large_list(pa.int64())), [1, 2]),
    "struct": (pa.array([{"a": 1, "b": WHEN.date()}]), {"a": 1, "b": "2020-01-02"}),
    "nested": (pa.array([[[WHEN.date()], None]]), [["2020-01-02"], None]),
    "list_of_structs": (pa.array([ADD]), [{"name": "add", "when": "2020-01-02"}]),
    "decimals": (pa.array([[CENT]], pa.list_(pa.decimal128(5, 2))), ["12.50"]),
    "numbers": (pa.array([[1.5, math.inf]]), [1.5, math.inf]),
}
BYTES = {
    "binary": pa.array([b"\xff"], pa.binary()),
    "large_binary": pa.array([b"ab"], pa.large_binary()),
    "fixed_binary": pa.array([b"ab"], pa.binary(2)),
    "binary_view": pa.array([b"ab"], pa.binary_view()),
    "list_of_binary": pa.array([[b"ab"]]),
    "struct_with_binary": pa.array([{"a": 1, "b": b"ab"}]),
}
UNREADABLE = {
    "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    "decimal32": pa.array([CENT], pa.decimal32(5, 2)),
    "decimal64": pa.array([CENT], pa.decimal64(5, 2)),
    "list_view": pa.array([[1, 2]], pa.list_view(pa.int64())),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3])]),
    "uuid": pa.array([b"0" * 16], pa.uuid()),
    "run_ends": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["x"])),
    "union": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
}


def written(table, path):
    """The table as a file, in the format of its suffix."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return parse_source(str(path))


def read(source, *, streamed):
    if streamed:
        return list(stream_rows([source], use_hf=True)())
    return load_source(source, use_hf=True, seed=0, shuffle=False).rows


def recorded(prompt):
    """The columns of a prompt as a resumed or replayed run reads them."""
    record = to_record(prompt, episode(prompt.token_ids), Score(total=1.0, parts=()), group=0)
    return prompt_of(json.loads(encode(record))).columns


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("streamed", [False, True], ids=["table", "stream"])
def test_every_type_is_json_and_comes_back(suffix, streamed, codec, tmp_path):
    table = pa.table({"question": ["Q?"], **{name: array for name, (array, _) in COLUMNS.items()}})
    rows = read(written(table, tmp_path / f"rows{suffix}"), streamed=streamed)
    (entry,) = prompt_table(rows, codec, max_length=None).entries
    wanted = {name: value for name, (_, value) in COLUMNS.items()}
    assert entry.columns == wanted
    assert {name: type(value) for name, value in entry.columns.items()} == {
        name: type(value) for name, value in wanted.items()
    }
    assert recorded(replace_draw(entry)) == wanted


def replace_draw(prompt):
    from dataclasses import replace

    return replace(prompt, origin=Origin(epoch=0, rollout=0))


def test_no_number_comes_back_as_none_or_a_word(codec):
    row = {"question": "Q?", "score": math.nan, "scores": [{"a": math.inf}, math.nan], "word": "nan"}
    (entry,) = prompt_table([row], codec, max_length=None).entries
    columns = recorded(replace_draw(entry))
    assert math.isnan(columns["score"])
    assert columns["scores"][0] == {"a": math.inf}
    assert math.isnan(columns["scores"][1])
    assert columns["word"] == "nan"


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_named_and_left_out(name, codec, tmp_path):
    table = pa.table({"question": ["Q?"], "solution": ["3"], "raw": BYTES[name]})
    rows = read(written(table, tmp_path / "rows.parquet"), streamed=False)
    found = prompt_table(rows, codec, max_length=None)
    assert found.unread_columns == ("raw",)
    assert found.entries[0].columns == {"solution": "3"}
    # A prompt of bytes is none.
    rows = [{"question": rows[0]["raw"], "solution": "3"}]
    assert prompt_table(rows, codec, max_length=None).left_out == {"no_prompt": 1}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_type_that_is_not_read_is_refused_by_its_name(name, tmp_path):
    array = UNREADABLE[name]
    source = written(pa.table({"question": ["Q?"], "odd": array}), tmp_path / "rows.arrow")
    for streamed in (False, True):
        with pytest.raises(DataError, match="column odd has the Arrow type"):
            read(source, streamed=streamed)


def test_csv_keeps_the_words_that_stand_there(codec, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,solution\nIs it?,None\nOr this?,NA\nAnd?,\n", encoding="utf-8")
    rows = read(parse_source(str(file)), streamed=False)
    assert [row["solution"] for row in rows] == ["None", "NA", None]
