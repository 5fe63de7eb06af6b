"""What an error of data carries beside its words."""

import json
from pathlib import Path

import pytest

from covey.data.errors import DataError
from covey.data.hub import Silence, not_cached_dataset
from covey.data.mix import mix, rename_columns, split_rows
from covey.data.prompt import system_text
from covey.data.sources import load_source, parse_source


def fault_of(source: str) -> DataError:
    with pytest.raises(DataError) as caught:
        load_source(parse_source(source), use_hf=True, seed=0, shuffle=False, offline=True)
    return caught.value


@pytest.mark.parametrize(
    ("name", "content", "kind", "line", "within"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q": \n', "line", 2, "line 2: Expecting value"),
        ("a.jsonl", b'{"q": 1}\n[1]\n', "line", 2, "line 2: a row must be a JSON object, not list"),
        ("a.jsonl", b'{"q": "\xff"}\n', "encoding", 0, "line 1: the bytes are not UTF-8 text"),
        ("a.json", b'[{"q": 1},\n{"q": }]', "line", 2, "line 2: Expecting value"),
        ("a.json", b"[1]", "", 0, "row 1: a row must be a JSON object, not int"),
        ("a.json", b'[{"q": "\xff"}]', "encoding", 0, ""),
        ("a.csv", b"a;b\n1;2\n", "", 0, ""),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes, kind: str, line: int, within: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = fault_of(str(path))
    assert (error.kind, error.line, error.within, error.subject) == (kind, line, within, str(path))
    assert str(error).startswith(f"{path}, {within}" if within else f"{path} ")


def test_the_encoding_is_named_where_the_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": 1}), encoding="utf-16")
    assert (fault_of(str(path)).kind, fault_of(str(path)).encoding) == ("encoding", "UTF-16")


def test_a_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    assert fault_of(f"{tmp_path}/a.jsonl@train").kind == "one_file"


def test_the_option_is_said() -> None:
    def option(call: object, *given: object, **options: object) -> str:
        with pytest.raises(DataError) as caught:
            call(*given, **options)  # type: ignore[operator]
        return caught.value.option

    assert option(mix, [[{}]], seed=0, interleave_prob=[0.5]) == "interleave_prob"
    assert option(split_rows, [{}], 0.5, seed=0) == "split_dataset_ratio"
    assert option(rename_columns, [{"a": 1}], {"b": "c"}) == "columns"
    assert option(system_text, "absent.txt") == "system"
    with pytest.raises(DataError) as caught:
        parse_source("a.jsonl#0")
    assert (caught.value.option, caught.value.subject) == ("", "a.jsonl#0")


def test_only_the_variable_counts_as_offline() -> None:
    assert not_cached_dataset("a/b", Silence("no answer")).kind == ""
    asked = not_cached_dataset("a/b", Silence("HF_HUB_OFFLINE is set", is_asked_for=True))
    assert (asked.kind, asked.subject) == ("offline", "a/b")
