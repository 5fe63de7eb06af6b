"""Rewards for answers in JSON or XML that a parser takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from xml.parsers import expat

from covey.rewards.tags import answer_tag
from covey.texts import tr

_FENCE = re.compile(r"```\w*[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def json_valid(*, completions: Sequence[str]) -> list[float | None]:
    """1 where the answer is one JSON object or array (RFC 8259), else 0; a bare number or string is none."""
    return [float(_is_json(payload(text))) for text in completions]


def xml_valid(*, completions: Sequence[str]) -> list[float | None]:
    """1 where the answer is one well-formed XML element without a document type, else 0."""
    return [float(_is_xml(payload(text))) for text in completions]


def payload(text: str) -> str:
    """The answer of a completion: in the last `<answer>`, else what follows the last `</think>`, else all;
    without a Markdown fence around it."""
    tagged = answer_tag(text)
    if tagged is not None:
        text = tagged
    elif "</think>" in text:
        text = text.rpartition("</think>")[2]
    fenced = _FENCE.fullmatch(text.strip())
    return (fenced[1] if fenced else text).strip()


def _is_json(text: str) -> bool:
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(tr("{word} is not valid JSON", word=word))


def _is_xml(text: str) -> bool:
    parser = expat.ParserCreate()

    def refuse(*declaration: Any) -> None:
        raise ValueError(tr("a document type can define entities that expand without limit"))

    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, ValueError):
        return False
    return True
