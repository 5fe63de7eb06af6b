"""The results as a table for people, and what of them is a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from on_gpu.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the process of a part ended; `code` is None where it was killed at its limit. `last` is the last
    line that it printed."""

    part: Part
    code: int | None
    seconds: float
    was_run: bool = True
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Lines to print, and faults; with none of them the check has passed."""

    lines: list[str]
    faults: list[str]


def table(results: Sequence[dict[str, Any]], ended: Sequence[Ended]) -> Table:
    """All cases by part, with predicted figures behind measured ones."""
    lines: list[str] = []
    faults: list[str] = []
    for end in ended:
        part = end.part
        cases = [r for r in results if r["part"] == part.name and r["case"] != "process"]
        lines.append(f"{part.number} {part.name}: {_how(end)}")
        lines += [_line(case) for case in cases]
        faults += [f"{part.name}: {why}" for why in _faults(end, cases)]
    return Table(lines=lines, faults=faults)


def _how(end: Ended) -> str:
    if not end.was_run:
        return "not finished"
    if end.code is None:
        return f"killed at its limit of {end.part.limit_s:.0f} s; parts.log says where it stood"
    return f"{end.seconds:.0f} s" + (
        f", exit status {end.code}; see parts.log: {end.last[:200]}" if end.code else ""
    )


def _faults(end: Ended, cases: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the check fail: a wrong result anywhere, and of a part that checks an unfinished one."""
    found = [f"{c['case']} FAILED" for c in cases if c["status"] == "FAILED"]
    if end.part.checks:
        found += [f"{c['case']} could not be run" for c in cases if c["status"] == "error"]
        if end.was_run and end.code is None:
            found.append("killed at its limit")
    if not end.was_run:
        return [*found, "not finished"]
    if end.code:
        found.append(f"exit status {end.code}")
    if not any(c["status"] in ("ok", "measured", "FAILED") for c in cases):
        found.append("no result")
    return found


def _line(case: dict[str, Any]) -> str:
    figures, predicted = case["figures"], case["predicted"]
    words = []
    for name, value in figures.items():
        if name == "seconds":
            continue
        # The whole text is in results.jsonl.
        value = value[:60] if isinstance(value, str) else value
        expected = f" (predicted {_number(predicted[name])})" if name in predicted else ""
        words.append(f"{name} {_number(value)}{expected}")
    why = [case["why"]] if case["why"] else []
    return f"  {case['status']:<8} {case['case']:<34} {', '.join(words + why)}".rstrip()


def _number(value: Any) -> str:
    match value:
        case list():
            return " to ".join(_number(v) for v in value)
        case bool() | str() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
