"""How checks put a problem into words: its code says why, the rest is said where it is found."""

from __future__ import annotations

from covey.codes import CODES
from covey.texts import tr
from covey.types import Fix, Problem, Severity


def problem(code: str, option: str, seen: str, cause: str, *fixes: Fix) -> Problem:
    """Return a problem that stops the run before it starts."""
    return Problem(code=code, option=option, seen=seen, why=CODES[code].why, cause=cause, fixes=fixes)


def warning(code: str, option: str, seen: str, cause: str, *fixes: Fix) -> Problem:
    """Return a word on something that the run goes on with."""
    return Problem(
        code=code,
        option=option,
        seen=seen,
        why=CODES[code].why,
        cause=cause,
        fixes=fixes,
        severity=Severity.WARNING,
    )


START_ANYWAY = Fix(
    text=tr("start anyway, if you are sure that the forecast is wrong"),
    edits={"ignore_memory_forecast": True},
)
"""The way past what is refused by an estimate."""
