"""Option values as they are typed: what is printed is read back as it was."""

import re
import shlex
import textwrap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config import parse
from covey.options.schema import OPTIONS, default_of
from covey.plan.words import columns, flags, note_lines, wrapped
from covey.types import Fix, Problem, Severity


def test_flags() -> None:
    assert flags({"num_generations": 8}) == "--num_generations 8"
    assert flags({"overwrite_output_dir": True}) == "--overwrite_output_dir true"
    assert flags({"trust_remote_code": False}) == "--trust_remote_code false"
    assert flags({"reward_funcs": ["a", "b c"]}) == "--reward_funcs a 'b c'"
    assert flags({"max_length": None, "temperature": 1.0}) == "--max_length none --temperature 1"
    assert flags({"learning_rate": 1e-6, "interleave_prob": [0.333333, 0.666667]}) == (
        "--learning_rate 1e-06 --interleave_prob 0.333333 0.666667"
    )
    assert flags({"lora_alpha": 0.1234567890123}) == "--lora_alpha 0.1234567890123"
    assert flags({}) == ""


VALUES: list[tuple[str, Any]] = [
    *((name, default_of(name)) for name in OPTIONS if default_of(name) not in (None, [])),
    ("system", "Say 'it' in \"two\" lines:\nfirst, second"),
    ("columns", {"question text": "question", "it's": "solution"}),
    ("chat_template_kwargs", {"enable_thinking": False, "budget": 5, "nested": {"a": [1, None]}}),
    ("chat_template_kwargs", None),
    ("modules_to_save", []),
    ("val_dataset", []),
    ("dataset", ["a b.jsonl", "hf::openai/gsm8k:main@train#50"]),
    ("reward_funcs", ["my rewards.py:f"]),
    ("learning_rate", 3.3e-7),
    ("max_steps", -1),
    ("max_length", None),
    ("rollout_log", 5),
]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=lambda v: str(v)[:40])
def test_what_is_printed_is_read_back(name: str, value: Any) -> None:
    parsed = parse(shlex.split(flags({name: value})))
    assert parsed.problems == ()
    assert parsed.typed[name].value == value


def test_wrapped() -> None:
    assert wrapped("one two three", "  ", width=9) == "  one two\n  three"
    # A path is never broken, nor is a word at its hyphens.
    assert wrapped("/a/very-long/path-to-it x", "", width=8) == "/a/very-long/path-to-it\nx"


def test_chinese_is_two_columns_wide_and_breaks_between_characters() -> None:
    assert columns("组 a，") == 6
    assert wrapped("一二三四五", " ", width=7) == " 一二三\n 四五"
    # No line begins with a full stop or a closing bracket, or ends in an opening one.
    assert wrapped("一二三。四", "", width=6) == "一二\n三。四"
    assert wrapped("一二（三）", "", width=6) == "一二\n（三）"
    # A name or a command between Chinese characters stays whole.
    assert wrapped("把num_generations改", "", width=8) == "把\nnum_generations\n改"
    assert wrapped("用`a 题 b`改", "", width=4) == "用\n`a 题 b`\n改"


@settings(max_examples=80, deadline=None)
@given(st.text("ab-,. ", max_size=60), st.integers(5, 30))
def test_text_in_latin_letters_breaks_as_textwrap_has_it(text: str, width: int) -> None:
    plain = " ".join(text.split())
    expected = textwrap.fill(
        plain,
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    assert wrapped(plain, "  ", width).strip() == expected.strip()


@settings(max_examples=80, deadline=None)
@given(st.text("题组ab，。（）` ", max_size=60), st.integers(8, 30))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    lines = wrapped(text, "  ", width)
    assert re.sub(r"\s", "", lines) == re.sub(r"\s", "", text)
    assert all(line.startswith("  ") for line in lines.splitlines())


def test_note_lines() -> None:
    problem = Problem(
        code="W103",
        option="learning_rate",
        seen="learning_rate is 0.",
        why="word " * 16 + "end.",
        fixes=(Fix(text="the default", edits={"learning_rate": 1e-6}), Fix(text="another")),
        severity=Severity.WARNING,
    )
    assert note_lines(problem) == [
        "W103      learning_rate is 0. " + "word " * 13 + "word",
        "          word word end.",
        "          --learning_rate 1e-06: the default",
    ]
    plain = Problem(code="W113", option="rlhf", seen="s.", why="w.", fixes=(Fix(text="do this"),))
    assert note_lines(plain) == ["W113      s. w.", "          do this"]
