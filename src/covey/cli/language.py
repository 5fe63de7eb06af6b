"""The language of messages: `--lang zh` or `--lang en`, else that of the environment, else English."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeVar

from covey.chinese.sentences import Sentences, sentences
from covey.codes import CODES, chinese_codes
from covey.errors import ConfigError
from covey.plan.problem import problem
from covey.types import Finding, Fix, Problem

Language = Literal["en", "zh"]
Message = TypeVar("Message", Problem, Finding)

LANGUAGE = "COVEY_LANG"
"""The environment variable with the language of a command, for the processes that it starts."""

_STOPS = ("。", "！", "？", "：", "…")


def language_of(environment: Mapping[str, str]) -> Language:
    """Return the language of an environment; of the locale's variables the first that is set counts."""
    names = (LANGUAGE, "LC_ALL", "LC_MESSAGES", "LANG")
    value = next((environment[name] for name in names if environment.get(name)), "")
    return "zh" if value.lower().startswith("zh") else "en"


def take_language(words: Sequence[str], environment: Mapping[str, str]) -> tuple[Language, list[str]]:
    """Return the language of a command and its words without `--lang`; ConfigError for another language."""
    language, rest, left = language_of(environment), [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name != "--lang":
            rest.append(word)
            continue
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("-") else ""
        if value.lower() not in ("en", "zh"):
            raise ConfigError([_unfit(value)])
        language = "zh" if value.lower() == "zh" else "en"
    return language, rest


@contextmanager
def passed_on(language: Language) -> Iterator[None]:
    """Let the processes that are started within speak the same language."""
    before = os.environ.get(LANGUAGE)
    os.environ[LANGUAGE] = language
    try:
        yield
    finally:
        if before is None:
            del os.environ[LANGUAGE]
        else:
            os.environ[LANGUAGE] = before


def in_chinese(message: Message) -> Message:
    """Return a problem or a finding with its texts in Chinese; one that has no counterpart stays English."""
    known = sentences()
    stands = message.code in CODES and message.why == CODES[message.code].why
    why = chinese_codes()[message.code].why if stands else _sentence(known, message.why)
    fixes = tuple(replace(fix, text=known.translated(fix.text) or fix.text) for fix in message.fixes)
    seen, cause = _sentence(known, message.seen), _sentence(known, message.cause)
    return replace(message, seen=seen, why=why, cause=cause, fixes=fixes)


def _sentence(known: Sentences, text: str) -> str:
    chinese = known.translated(text)
    if chinese is None:
        return text
    return chinese if chinese.endswith(_STOPS) else f"{chinese}。"


def _unfit(value: str) -> Problem:
    return problem(
        "E104" if value else "E103",
        "lang",
        f"`--lang` takes zh or en, and got {value or 'nothing'}.",
        "Messages are written in these two languages.",
        Fix(text="--lang zh: messages in Chinese"),
    )
