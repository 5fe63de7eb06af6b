"""Values in texts: cut, and with nothing in them that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.texts import LONGEST, Whole, fitted, joined, packed, tr, unpacked, visible
from covey.texts.catalogue import catalogue
from covey.texts.terminal import say, say_json

# Red; clear the screen by the one-byte escape; a new title; a line written over; text from right to left.
HOSTILE = "a\x1b[31mb\x9b2Jc\x1b]0;x\x07d\re\u202ef\x7f\0"
UNSAFE = "\x1b\x9b\x07\r\u202e\x7f\0"


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    for text in (visible(HOSTILE), tr("{x}", x=HOSTILE), tr("{x!r}", x=HOSTILE), tr("{x}", x=[HOSTILE])):
        assert not set(UNSAFE) & set(text)
        assert "\\x1b[31mb" in text and "\\x9b2Jc" in text
    assert visible(HOSTILE) == r"a\x1b[31mb\x9b2Jc\x1b]0;x\x07d\re\u202ef\x7f\x00"


def test_repr_writes_it_as_python_does() -> None:
    assert tr("{x!r}", x="a\x1bb") == r"'a\x1bb'"


def test_plain_text_stays() -> None:
    for text in ("line\nline\ttab", "Ünï 汉字 🙂 a\u200db", "", "\\x1b"):
        assert visible(text) == text and tr("{x}", x=text) == text


def test_a_long_value_is_cut_and_says_its_length() -> None:
    text = tr("It is {x}.", x="y" * 100_000)
    assert text == f"It is {'y' * LONGEST}… (100,000 characters)."
    assert len(tr("{x!r}", x="y" * 100_000)) < 250
    assert len(tr("{x}", x=["y" * 100_000])) < 250
    assert len(tr("{x}", x=ValueError("y" * 100_000))) < 250
    assert tr("{x}", x="y" * LONGEST) == "y" * LONGEST


def test_it_is_cut_once() -> None:
    """Within another text, in another language, and behind a pipe it has the same length in words."""
    inner = tr("{x}", x="y" * 100_000)
    for text in (tr("{inner}", inner=inner), unpacked(packed(inner)), catalogue("zh").said(inner)):
        assert str.__str__(text) == str.__str__(inner)
    assert fitted(fitted("y" * 1000)) == fitted("y" * 1000)


def test_what_is_to_be_typed_stays_whole() -> None:
    command = Whole(f"covey plan --model {'m' * 500}")
    assert tr("`{command}`", command=command) == f"`{command}`"
    assert tr("{path}", path=Path("/p" * 300)) == "/p" * 300
    assert len(tr("`{command}`", command=Whole("c" * 100_000))) < 5000


def test_each_of_many_names_is_cut_alone() -> None:
    text = tr(
        "the columns are {names}", names=joined(", ", [*(f"column_{n}" for n in range(100)), "z" * 999])
    )
    assert "column_99, zzz" in text and text.endswith("… (999 characters)")


def test_numbers_keep_their_formats() -> None:
    assert tr("{x:,} {y:.2f} {z:>4}", x=12345, y=0.5, z="ab") == "12,345 0.50   ab"


def test_the_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one {HOSTILE}\ntwo")
    assert capsys.readouterr().out == f"one {visible(HOSTILE)}\ntwo\n"


def test_json_holds_the_value_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({HOSTILE: ["汉字", HOSTILE * 100]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE: ["汉字", HOSTILE * 100]}
    assert not set(UNSAFE) & set(out) and "汉字" in out
