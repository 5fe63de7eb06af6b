"""Problems and findings in Chinese."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from covey.texts import Text
from covey.texts.catalogue import catalogue
from covey.types import Finding, Problem

Message = TypeVar("Message", Problem, Finding)

_STOPS = ("。", "！", "？", "：", "…")


def in_chinese(message: Message) -> Message:
    """Return a problem or a finding with its texts in Chinese; one that has no counterpart stays English."""
    said = catalogue("zh").said
    fixes = tuple(replace(fix, text=said(fix.text)) for fix in message.fixes)
    seen, why, cause = (_sentence(said(text)) for text in (message.seen, message.why, message.cause))
    return replace(message, seen=seen, why=why, cause=cause, fixes=fixes)


def option_in_chinese(option: str) -> str:
    """Return what a problem is about: the name of an option stays, and a text is put into Chinese."""
    return catalogue("zh").said(option) if isinstance(option, Text) else option


def _sentence(text: str) -> str:
    is_chinese = any("\u3400" <= character <= "\u9fff" for character in text)
    return f"{text}。" if is_chinese and not text.endswith(_STOPS) else text
