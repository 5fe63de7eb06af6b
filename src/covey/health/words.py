"""How a guard stops a run: the four parts of a finding, whose reason is its code's."""

from __future__ import annotations

from covey.codes import CODES
from covey.errors import GuardStop
from covey.texts import tr
from covey.types import Finding, Fix

REPORT = Fix(text=tr("report this with the run directory: it is a bug that no configuration can cause"))


def broken(code: str, step: int, seen: str, cause: str, *fixes: Fix) -> GuardStop:
    """The end of a run in which something is so that cannot be."""
    return GuardStop(
        Finding(
            code=code,
            seen=tr("step {step}: {seen}", step=step, seen=seen),
            why=CODES[code].why,
            cause=cause,
            fixes=fixes or (REPORT,),
            step=step,
        )
    )
