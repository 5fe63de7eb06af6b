"""The language of messages: `--lang zh` or `--lang en`, else that of the environment, else English."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeVar

from covey.chinese.sentences import Sentences, sentences
from covey.codes import CODES, chinese_codes
from covey.types import Finding, Problem

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
