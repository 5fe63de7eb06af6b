"""A finding as a line of events.jsonl, and what is read back of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.types import Finding, Fix


def fields_of(finding: Finding) -> dict[str, Any]:
    """What is recorded of a finding; its reason is its code's."""
    fixes = [{"text": fix.text, "edits": dict(fix.edits)} for fix in finding.fixes]
    return {"code": finding.code, "seen": finding.seen, "cause": finding.cause, "fixes": fixes}


def fixes_of(event: Mapping[str, Any]) -> tuple[Fix, ...]:
    """The fixes of a recorded finding, as far as they can be read; a record may have none."""
    found = event.get("fixes")
    return tuple(
        Fix(text=fix["text"], edits=edits)
        for fix in (found if isinstance(found, list) else [])
        if isinstance(fix, dict) and isinstance(fix.get("text"), str)
        if isinstance(edits := fix.get("edits", {}), dict)
    )
