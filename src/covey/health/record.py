"""A finding as a line of events.jsonl, and what is read back of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from covey.texts import packed, unpacked
from covey.types import Finding, Fix

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def fields_of(finding: Finding) -> dict[str, Any]:
    """Return a finding as it is recorded; its reason is its code's. `texts` holds templates with values."""
    fixes = [{"text": fix.text, "edits": dict(fix.edits)} for fix in finding.fixes]
    texts = {
        "seen": packed(finding.seen),
        "cause": packed(finding.cause),
        "fixes": [packed(fix.text) for fix in finding.fixes],
    }
    fields = {"code": finding.code, "severity": str(finding.severity), "seen": finding.seen}
    return {**fields, "cause": finding.cause, "fixes": fixes, "texts": texts}


def text_of(event: Mapping[str, Any], name: str) -> str:
    """What a recorded finding says as `seen` or `cause`, in any language where its template is recorded."""
    texts = event.get("texts")
    return _text(texts.get(name) if isinstance(texts, dict) else None, str(event.get(name, "")))


def fixes_of(event: Mapping[str, Any]) -> tuple[Fix, ...]:
    """The fixes of a recorded finding, as far as they can be read; a record may have none."""
    found, texts = event.get("fixes"), event.get("texts")
    every = texts.get("fixes") if isinstance(texts, dict) else None
    recorded = dict(enumerate(every if isinstance(every, list) else []))
    return tuple(
        Fix(text=_text(recorded.get(number), fix["text"]), edits=edits)
        for number, fix in enumerate(found if isinstance(found, list) else [])
        if isinstance(fix, dict) and isinstance(fix.get("text"), str)
        if isinstance(edits := fix.get("edits", {}), dict)
    )


def _text(recorded: Any, english: str) -> str:
    """The text that was recorded with its template; the English one where the two are not the same."""
    if not isinstance(recorded, dict):
        return english
    try:
        text = unpacked(_numbers(recorded))
    except (KeyError, TypeError, ValueError, AttributeError):
        return english
    return text if str.__eq__(text, english) else english


def _numbers(value: Any) -> Any:
    """JSON with the numbers that it has no words for."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items()}
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
