"""JSON lines as they are found: cut short, compressed, of another encoding, or no JSON."""

import gzip
from pathlib import Path

import pytest

from covey.json_lines import UNREADABLE, opened, read_lines


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": ', "json"),
        (b"[" * 100_000, "json"),
        (b'{"a": ' + b"1" * 5000 + b"}", "json"),
        (b'{"a": "\xff"}', "encoding"),
        (b"[1]", "object"),
    ],
    ids=["cut", "nested", "digits", "encoding", "list"],
)
def test_a_bad_line_is_told_apart_and_ends_nothing(content: bytes, fault: str) -> None:
    first, bad, last = read_lines([b'{"n": 1}\n', content + b"\n", b'{"n": 3}\n'])
    assert (first.record, last.record) == ({"n": 1}, {"n": 3})
    assert (bad.number, bad.fault, bad.record) == (2, fault, {}) and bad.why


def test_blank_lines_are_passed_over_and_a_last_one_without_its_end_is_known() -> None:
    lines = list(read_lines([b"\xef\xbb\xbf{}\n", b" \r\n", b'{"n": 3}']))
    assert [(line.number, line.record, line.is_whole) for line in lines] == [
        (1, {}, True),
        (3, {"n": 3}, False),
    ]


def test_a_line_break_of_other_texts_is_none_here(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "\u2028\x85"}\n'.encode())
    with opened(path) as file:
        assert [line.record for line in read_lines(file)] == [{"a": "\u2028\x85"}]


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    with opened(path) as file:
        assert [line.record for line in read_lines(file)] == [{"a": 1}]
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(UNREADABLE), opened(path) as file:
        list(read_lines(file))
