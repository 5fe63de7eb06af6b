"""What is said to people: faults of a configuration and of a run, and the ways out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """What a problem or finding does to the run."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One way out, in words, with the option values that the same arithmetic has accepted."""

    text: str
    edits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of a configuration, in four parts: seen, why it matters, likely cause, fixes."""

    code: str
    option: str
    seen: str
    why: str
    cause: str = ""
    fixes: tuple[Fix, ...] = ()
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault of a run, in the same four parts, with the step at which it showed."""

    code: str
    seen: str
    why: str
    cause: str
    fixes: tuple[Fix, ...] = ()
    severity: Severity = Severity.ERROR
    step: int | None = None
