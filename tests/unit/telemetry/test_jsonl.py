from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from covey.errors import CoveyError
from covey.telemetry import jsonl
from covey.telemetry.jsonl import append_line, as_float, cut_torn_tail, encode, read_records, write_text
from covey.types import Finish, Fix


def test_numbers_keep_every_digit_and_zero_stands_apart() -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, -0.0, 0.0, 1e22]
    text = encode(values)
    assert [math.copysign(1, v) for v in json.loads(text)] == [math.copysign(1, v) for v in values]
    assert json.loads(text) == values
    assert encode(1e-320) != encode(0.0)


def test_non_finite_numbers_are_words() -> None:
    text = encode({"a": math.nan, "b": [math.inf, (-math.inf, 1.5)], "c": Finish.STOP, "d": Path("x")})
    assert text == '{"a": "nan", "b": ["inf", ["-inf", 1.5]], "c": "stop", "d": "x"}'
    assert as_float("inf") == math.inf and math.isnan(as_float("nan")) and as_float("-inf") == -math.inf
    assert as_float("other") == "other" and as_float(0.5) == 0.5


def test_what_events_carry_is_written_as_mappings() -> None:
    record = {"fix": Fix(text="halve it", edits={"lr": 0.5}), "names": {"b", "a"}}
    assert json.loads(encode(record)) == {
        "fix": {"text": "halve it", "edits": {"lr": 0.5}},
        "names": ["a", "b"],
    }
    with pytest.raises(CoveyError, match="object cannot be recorded"):
        encode({"x": object()})


def test_text_of_any_kind_is_one_line_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    record = {"text": "a\nb\r\u2028\x85 \ud800 中文 –"}
    append_line(path, record)
    append_line(path, {"next": 1})
    with path.open("rb") as file:
        assert list(read_records(file, path)) == [record, {"next": 1}]


def test_an_unfinished_last_line_is_left_out_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_records(path.read_bytes().splitlines(keepends=True), path)) == [{"a": 1}]
    assert cut_torn_tail(path) == 7
    assert path.read_text() == '{"a": 1}\n'
    assert cut_torn_tail(path) == 0 and cut_torn_tail(tmp_path / "absent") == 0


@pytest.mark.parametrize("line", [b'{"a": \n', b"3\n", b'{"a": "\xff"}\n', b"[" * 100_000 + b"\n"])
def test_a_bad_line_is_named(line: bytes) -> None:
    with pytest.raises(CoveyError, match=r"metrics\.jsonl, line 2"):
        list(read_records([b'{"a": 1}\n', line, b'{"a": 3}\n'], Path("metrics.jsonl")))


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_leaves_the_former_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "config.yaml"
    write_text(path, "former")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(jsonl.os, name, fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "former" and os.listdir(tmp_path) == ["config.yaml"]
