"""Rewards for the form of a completion: which tags it has, how often, in which order."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)
_THINK = re.compile(r"<think>(?:(?!</?think>).)*</think>(?:(?!<think>).)*", re.DOTALL)
_REACT = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*"
    r"Action:\s*(?!Action Input:)\S(?:(?!Action Input:|</?think>).)*Action Input:(?:(?!</?think>).)*",
    re.DOTALL,
)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is `<think>…</think><answer>…</answer>`, each tag once and nothing around them;
    else 0."""
    return [float(_FORMAT.fullmatch(text) is not None) for text in completions]


def think_format_reward(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion starts with one `<think>…</think>`, whatever follows that opens no second; else
    0."""
    return [float(_THINK.fullmatch(text) is not None) for text in completions]


def react_format(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is one `<think>…</think>`, then `Action:` with a name, then `Action Input:`; else
    0.

    Between `</think>` and `Action:` there is white space only; what follows `Action Input:` is free but for
    a second block of thought.
    """
    return [float(_REACT.fullmatch(text) is not None) for text in completions]


def tag_count(*, completions: Sequence[str]) -> list[float | None]:
    """A quarter for each of `<think>`, `</think>`, `<answer>` and `</answer>` that a completion has exactly
    once, in any order."""
    return [sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for text in completions]
