"""Compare covey with TRL and ms-swift on the same work: `python bench/compare [CASE or PART ...]`.

Each side runs in a process of its own and in its own environment, in turns; figures are medians over the
runs. Cases of long steps run less often. A side whose Python is not named is left out. Parts: equal-work,
floor (of the cases named), lengths, accumulation, memory, soak. Nothing named: every case and every part.
`--write FILE` keeps it all as a Markdown page, which is written anew with each section.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import equal_work  # noqa: E402
import floor  # noqa: E402
import scaling  # noqa: E402
import soak  # noqa: E402
import table  # noqa: E402
from cases import CASES, Case  # noqa: E402
from machine import facts  # noqa: E402
from page import kept_of, page  # noqa: E402
from runs import Measured, SideFailed, measure  # noqa: E402

PARTS = ("equal-work", "floor", "lengths", "accumulation", "memory", "soak")


def main() -> None:
    """Run what was asked for, print it, and write it where that was asked for too."""
    arguments = _arguments()
    names = arguments.names or [*(c.name for c in CASES), *PARTS]
    pythons = {"covey": sys.executable}
    pythons |= {side: python for side in ("trl", "swift") if (python := getattr(arguments, side))}
    with tempfile.TemporaryDirectory() as work:
        try:
            _run(names, pythons, Path(work), arguments)
        except SideFailed as error:
            sys.exit(str(error))


def _arguments() -> argparse.Namespace:
    known = [*(c.name for c in CASES), *PARTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE or PART", help=f"of {', '.join(known)}; none: all")
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--swift", help="the Python of an environment with ms-swift")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, at most")
    parser.add_argument("--write", type=Path, help="a Markdown file for the whole")
    found = parser.parse_args()
    if unknown := [name for name in found.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(known)}")
    if gone := [python for python in (found.trl, found.swift) if python and shutil.which(python) is None]:
        parser.error(f"{', '.join(gone)}: no such program; `make bench` makes both environments")
    if found.repeats < 1:
        parser.error(f"--repeats {found.repeats}: at least 1")
    if found.write and not found.write.parent.is_dir():
        parser.error(f"--write {found.write}: no folder {found.write.parent}")
    return found


Report = dict[str, list[str]]
# What grows with what, of covey alone.
_GROWTH: Mapping[str, Callable[[Path], list[str]]] = {
    "lengths": scaling.length_table,
    "accumulation": scaling.accumulation_table,
    "memory": scaling.memory_table,
    "soak": soak.lines,
}


def _run(names: list[str], pythons: Mapping[str, str], work: Path, arguments: argparse.Namespace) -> None:
    """Every section that was asked for; its lines are shown and written as soon as they are there."""
    report: Report = {}
    measured_on, kept = [], ""
    if arguments.write is not None:
        measured_on = facts(pythons)
        kept = kept_of(arguments.write.read_text(encoding="utf-8")) if arguments.write.is_file() else ""

    def say(section: str, lines: list[str]) -> None:
        report.setdefault(section, []).extend(lines)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        if arguments.write is not None:
            arguments.write.write_text(page(report, measured_on, kept), encoding="utf-8")

    if "equal-work" in names:
        say("equal-work", [*equal_work.HEAD, *equal_work.rows(pythons, work)])
    for part in _GROWTH:
        if part in names:
            say(part, _GROWTH[part](work))
    rates = floor.measured_rates(work) if "floor" in names else None
    if rates is not None:
        say("rates", floor.rates_table(rates))
    for case in (case for case in CASES if case.name in names):
        found = measure(case, work, pythons, arguments.repeats)
        _say_case(case, found, report, say)
        if rates is not None and case.target is None:
            head = [] if "floor" in report else list(floor.HEAD)
            say("floor", [*head, *floor.rows(case, found["covey"], work / "models" / case.model, rates)])


def _say_case(
    case: Case, found: dict[str, Measured], report: Report, say: Callable[[str, list[str]], None]
) -> None:
    """A case's rows, in the table or on the way to the target, and why sides have none."""
    section, head, rows = ("table", table.HEAD, table.rows)
    if case.target is not None:
        section, head, rows = ("target", table.TARGET_HEAD, table.target_rows)
    say(section, [*([] if section in report else head), *rows(case, found)])
    if why := table.reasons(case, found):
        say("why", why)


if __name__ == "__main__":
    main()
