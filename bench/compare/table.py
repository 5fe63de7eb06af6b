"""The table: a row for each side of each case."""

from __future__ import annotations

from collections.abc import Mapping

from cases import Case
from runs import NAMES, Measured

HEAD = (
    "| case | | side | runs | s/step | rollout | rewards | update | completions/s | tokens/s | peak GB "
    "| s/step over covey's |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
TARGET_HEAD = (
    "| side | runs | seconds | steps | s/step | over covey's seconds |",
    "|---|---|---|---|---|---|",
)


def rows(case: Case, found: Mapping[str, Measured]) -> list[str]:
    """The rows of a case, one a side; a side without figures has dashes."""
    lines = []
    for side, measured in found.items():
        first = (case.name, case.says) if side == "covey" else ("", "")
        if measured.failed:
            cells = ["–"] * 9
        else:
            cells = [
                f"{len(measured.figures)}",
                *(f"{measured.median(n):.3f}" for n in ("step_s", "rollout_s", "reward_s", "update_s")),
                *(f"{measured.median(n):,.0f}" for n in ("completions_per_s", "tokens_per_s")),
                f"{measured.median('peak_gb'):.2f}",
                _ratio(measured, found["covey"], "step_s"),
            ]
        lines.append(_line([*first, NAMES[side], *cells]))
    return lines


def target_rows(case: Case, found: Mapping[str, Measured]) -> list[str]:
    """The rows of the way to the target of a case, one a side."""
    lines = []
    for side, measured in found.items():
        cells = ["–"] * 5
        if not measured.failed:
            cells = [
                f"{len(measured.figures)}",
                f"{measured.median('total_s'):.1f}",
                f"{measured.median('steps'):.0f}",
                f"{measured.median('step_s'):.3f}",
                _ratio(measured, found["covey"], "total_s"),
            ]
        lines.append(_line([NAMES[side], *cells]))
    return lines


def reasons(case: Case, found: Mapping[str, Measured]) -> list[str]:
    """Why sides have dashes, one line a side."""
    return [
        f"- case {case.name}, {NAMES[side]}: {measured.failed}"
        for side, measured in found.items()
        if measured.failed
    ]


def _ratio(measured: Measured, covey: Measured, name: str) -> str:
    return f"{measured.median(name) / covey.median(name):.2f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
