"""Rewards for the form of a completion."""

from __future__ import annotations

from collections.abc import Sequence

from covey.rewards.declare import BuiltIn
from covey.rewards.fenced import has_named_program
from covey.rewards.formats import format_reward, react_format, tag_count, think_format_reward
from covey.rewards.validity import json_valid, xml_valid


def code_format(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is what `format` asks for, with a fenced block that says `python` in the answer;
    else 0."""
    return [
        f if has_named_program(t) else 0.0
        for t, f in zip(completions, format_reward(completions=completions), strict=True)
    ]


CODE = BuiltIn(name="code_format", function=code_format)
FORMAT = BuiltIn(name="format", function=format_reward)
JSON = BuiltIn(name="json_valid", function=json_valid)
REACT = BuiltIn(name="react_format", function=react_format)
TAGS = BuiltIn(name="tag_count", function=tag_count)
THINK = BuiltIn(name="think_format_reward", function=think_format_reward)
XML = BuiltIn(name="xml_valid", function=xml_valid)
