"""What a judge is asked, and the number in what it answers.

All of the text may be hostile: it is inserted once, never formatted, and searched within bounds of length and
time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from os.path import expanduser, isfile
from pathlib import Path
from typing import Any

import regex

from covey.errors import CoveyError
from covey.texts import tr

SEARCHED = 20_000
"""Characters at the end of an answer that the pattern is looked for in."""

SEARCH_LIMIT_S = 1.0
"""Seconds that the search may take."""

# What openai's client waits before it asks again, at most.
_BACKOFF_S = 8.0
_PLACE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


class NoReward(CoveyError):
    """An answer without a number that can be read."""


class BadPattern(CoveyError):
    """A pattern that finds no reward: it does not compile, or has no group, or several."""


def template_text(value: str) -> str:
    """The text that `judge_prompt` means: that of a file, or the words themselves."""
    path = Path(expanduser(value))
    is_name = "\n" not in value and len(value) < 1000
    return path.read_text(encoding="utf-8") if is_name and value and isfile(path) else value


def placeholders(template: str) -> list[str]:
    """The names in single braces, each once: `placeholders("{a} {b} {a} {{c}}")` is ["a", "b"]."""
    return list(dict.fromkeys(m[2] for m in _PLACE.finditer(template) if m[2]))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its names filled in, and `{name}` for `{{name}}`.

    What is filled in is not searched for names again; a name without a value is left out.
    """
    return _PLACE.sub(lambda m: f"{{{m[1]}}}" if m[1] else values.get(m[2], ""), template)


def prompt_in_words(messages: Sequence[Mapping[str, Any]]) -> str:
    """A prompt for a reader: the question where it is one message, else each with its role before it."""
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"{m.get('role')}: {m.get('content') or ''}" for m in messages)


def reward_pattern(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern; BadPattern says what is wrong with it."""
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise BadPattern(tr("it is not a valid regular expression: {error}", error=error)) from error
    if compiled.groups != 1:
        raise BadPattern(
            tr(
                "it has {groups} groups, but exactly one group must contain the reward",
                groups=compiled.groups,
            )
        )
    return compiled


def reward_in(answer: str, pattern: regex.Pattern[str]) -> float:
    """The number in the group of the last match; NoReward says why there is none."""
    number_text = None
    try:
        for match in pattern.finditer(answer[-SEARCHED:], timeout=SEARCH_LIMIT_S):
            number_text = match[1]
    except TimeoutError:
        raise NoReward(
            tr(
                "the search with judge_regex took more than {search_limit_s:g} s",
                search_limit_s=SEARCH_LIMIT_S,
            )
        ) from None
    if number_text is None:
        raise NoReward(tr("judge_regex finds no reward in the answer {answer!r}", answer=answer[-200:]))
    try:
        value = float(number_text)
    except ValueError:
        raise NoReward(
            tr("judge_regex finds {number_text!r}, which is not a number", number_text=number_text[:80])
        ) from None
    if not math.isfinite(value):
        raise NoReward(
            tr(
                "judge_regex finds {number_text!r}, which is not a finite number",
                number_text=number_text[:80],
            )
        )
    return value


def row_limit_s(retries: int, timeout_s: float) -> float:
    """Seconds after which a question is given up, whatever it waits for."""
    return (retries + 1) * timeout_s + retries * _BACKOFF_S
