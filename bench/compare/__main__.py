"""Compare covey with TRL and ms-swift on the same work: `python bench/compare [CASE or PART ...]`.

Each side runs in a process of its own and in its own environment, in turns; figures are medians over the
runs. Cases of long steps run once. A side whose Python is not named is left out. Parts: equal-work, floor (of
the cases named), lengths, accumulation, memory, soak. Nothing named: every case and every part. `--write
FILE` keeps it all as a Markdown page, which is written anew with each section.
"""

from __future__ import annotations

import argparse
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
from page import page  # noqa: E402
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
    measured_on = facts(pythons) if arguments.write is not None else []

    def say(section: str, lines: list[str]) -> None:
        report.setdefault(section, []).extend(lines)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        if arguments.write is not None:
            arguments.write.write_text(page(report, measured_on), encoding="utf-8")

    chosen = [case for case in CASES if case.name in names]
    _cases(chosen, pythons, work, arguments.repeats, say, with_floor="floor" in names)
    if "equal-work" in names:
        say("equal-work", [*equal_work.HEAD, *equal_work.rows(pythons, work)])
    for part in _GROWTH:
        if part in names:
            say(part, _GROWTH[part](work))


def _cases(
    chosen: list[Case],
    pythons: Mapping[str, str],
    work: Path,
    repeats: int,
    say: Callable[[str, list[str]], None],
    *,
    with_floor: bool,
) -> None:
    """The table of the cases, the way to the target, why sides are missing, and the floors."""
    found: dict[str, dict[str, Measured]] = {}
    steady = [case for case in chosen if case.target is None]
    for section, head, part in (
        ("table", table.HEAD, steady),
        ("target", table.TARGET_HEAD, [case for case in chosen if case.target is not None]),
    ):
        if part:
            say(section, list(head))
        for case in part:
            found[case.name] = measure(case, work, pythons, repeats)
            make = table.rows if case.target is None else table.target_rows
            say(section, make(case, found[case.name]))
    if why := table.reasons(found):
        say("why", why)
    if with_floor:
        rates = floor.measured_rates(work)
        say("rates", floor.rates_table(rates))
        if steady:
            say("floor", list(floor.HEAD))
        for case in steady:
            say("floor", floor.rows(case, found[case.name]["covey"], work / "models" / case.model, rates))


if __name__ == "__main__":
    main()
