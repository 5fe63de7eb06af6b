"""The language of messages: `--lang zh` or `--lang en`, else that of the environment, else English."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from covey.texts import Text
from covey.texts.catalogue import catalogue

Language = Literal["en", "zh"]

LANGUAGE = "COVEY_LANG"
"""The environment variable with the language of a command, for the processes that it starts."""


def language_of(environment: Mapping[str, str]) -> Language:
    """Return the language of an environment; of the locale's variables the first that is set counts."""
    names = (LANGUAGE, "LC_ALL", "LC_MESSAGES", "LANG")
    value = next((environment[name] for name in names if environment.get(name)), "")
    return "zh" if value.lower().startswith("zh") else "en"


def spoken(text: str) -> str:
    """Return a text in the language of this process; what is no `Text` stays as it is."""
    language = language_of(os.environ)
    return text if language == "en" or not isinstance(text, Text) else catalogue(language).said(text)


@contextmanager
def passed_on(language: Language) -> Iterator[None]:
    """Let this process, and those that are started within, speak a language."""
    before = os.environ.get(LANGUAGE)
    os.environ[LANGUAGE] = language
    try:
        yield
    finally:
        if before is None:
            del os.environ[LANGUAGE]
        else:
            os.environ[LANGUAGE] = before
