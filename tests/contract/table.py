"""Runs every cell of the contract and prints how far each is from its oracle: `make contract`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from contract import cells
from contract.backends import KINDS, Kind
from contract.cells import ACCUMULATIONS, DTYPES, ROWS, STOPPED, Cell, full, reason_against
from contract.compare import Gap, broken
from contract.faults import FAULTS, Fault
from contract.matrix import Bench, Trial, fault_cell, resume_gaps

Found = Mapping[Cell, Sequence[Gap]]
Table = list[str]


def main() -> int:
    """Print the tables; 1 where a cell is out of its bounds, or a fault is not named as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a Markdown file with the marks of the tables")
    parser.add_argument("--only", nargs="*", default=[k.name for k in KINDS], help="backends to run")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.name in arguments.only]
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work))
        faults = [fault_cell(kind, fault) for kind in kinds for fault in FAULTS]
        bench.run_oracles(KINDS[0], [*faults, *(cell for kind in kinds for cell in full(kind))])
        _say("oracles")
        found: dict[Kind, Found] = {}
        trials = [trial for kind in kinds if (trial := _trial(bench, kind, found, bad))]
        resumes = _resumes(trials, bad)
        named = {trial.kind: trial.named for trial in trials}
    for kind, own in named.items():
        bad += [f"{kind.name}: {f.name}: {by}" for f, by in own.items() if not _is_right(f, kind, by)]
    bad += [f"{name}: {words}" for name, gaps in resumes.items() for words in broken(gaps)]
    tables = {
        "cells": _cell_table(found),
        "metrics": _metric_table(found),
        "nonsense": _nonsense_table(kinds),
        "resumes": _resume_table(resumes),
        "faults": _fault_table(named),
    }
    for name, lines in tables.items():
        sys.stdout.write("\n".join([f"\n{name}", *lines, ""]))
    if arguments.write:
        arguments.write.write_text(with_tables(arguments.write.read_text(), tables))
    sys.stdout.write(
        "\n".join(["", *(bad or ["every cell is within its bounds, and every fault is named"]), ""])
    )
    return 1 if bad else 0


_BEGAN = time.monotonic()


def _say(what: str) -> None:
    sys.stderr.write(f"{time.monotonic() - _BEGAN:6.0f} s  {what}\n")


def _trial(bench: Bench, kind: Kind, found: dict[Kind, Found], bad: list[str]) -> Trial | None:
    """A backend's runs; what is out of its bounds is said at once. One that fails does not end the others."""
    try:
        trial = Trial(bench, kind, full(kind), faults=FAULTS, stopped=STOPPED)
    except (AssertionError, RuntimeError):
        bad.append(f"{kind.name}: its runs ended with\n{traceback.format_exc()}")
        _say(bad[-1])
        return None
    found[kind] = {cell: bench.gaps(cell, left) for cell, left in trial.cells.items()}
    wrong = [f"{kind.name}, {cell}: {words}" for cell, gaps in found[kind].items() for words in broken(gaps)]
    _say("\n".join([f"{kind.name}, {len(trial.cells)} cells, {len(wrong)} wrong", *wrong]))
    bad += wrong
    return trial


def _resumes(trials: Sequence[Trial], bad: list[str]) -> dict[str, Sequence[Gap]]:
    """Every backend resumed in itself, and in every other."""
    found: dict[str, Sequence[Gap]] = {}
    for by in trials:
        try:
            gone_on = by.go_on(trials)
        except (AssertionError, RuntimeError):
            bad.append(f"{by.kind.name}: its resumes ended with\n{traceback.format_exc()}")
            _say(bad[-1])
            continue
        for other, left in zip(trials, gone_on, strict=True):
            for cell, gaps in resume_gaps(left, other, by).items():
                found[f"{_layout(other)} → {_layout(by)}, {cell.tuner}, {cell.dtype}"] = gaps
        _say(f"{by.kind.name}, resumes")
    return found


def _layout(trial: Trial) -> str:
    return f"{trial.kind.name} on {trial.world}"


def _is_right(fault: Fault, kind: Kind, by: str) -> bool:
    return by.startswith(fault.named_by(kind))


def _cell_table(found: Mapping[Kind, Found]) -> Table:
    """A line for each backend, tuner, number of processes and kind of rows."""
    columns = [(dtype, accumulation) for dtype in DTYPES for accumulation in ACCUMULATIONS]
    lines = [
        "| backend | trained | processes | rows |" + "".join(f" {d} × {a} |" for d, a in columns),
        "|---|---|---|---|" + "---|" * len(columns),
    ]
    for kind, own in found.items():
        rows: dict[tuple[str, int, str], dict[tuple[str, int], str]] = {}
        for cell, gaps in own.items():
            place = rows.setdefault((cell.tuner, cell.world, cell.shared_rows), {})
            place[cell.dtype, cell.accumulation] = _shown(gaps)
        for (tuner, world, name), values in rows.items():
            shown = "".join(f" {values.get(column, '')} |" for column in columns)
            lines.append(f"| {kind.name} | {tuner} | {world} | {name} |{shown}")
    return lines


def _shown(gaps: Sequence[Gap]) -> str:
    """How far the gradient is away, in bold with a mark where anything is out of its bound."""
    gradient = next((gap.found for gap in gaps if gap.what == "gradient"), float("inf"))
    return f"**{gradient:.0e}!**" if broken(gaps) else f"{gradient:.0e}"


def _metric_table(found: Mapping[Kind, Found]) -> Table:
    """The largest gap of everything else, in float32."""
    lines = [
        "| what | " + " | ".join(kind.name for kind in found) + " | bound |",
        "|---|" + "---|" * (len(found) + 1),
    ]
    worst: dict[str, dict[Kind, Gap]] = {}
    for kind, own in found.items():
        for gap in (g for cell, gaps in own.items() if cell.dtype == "float32" for g in gaps if g.bound):
            place = worst.setdefault(gap.what, {})
            if kind not in place or gap.found > place[kind].found:
                place[kind] = gap
    equal = [what for what, gaps in worst.items() if not any(gap.found for gap in gaps.values())]
    for what, gaps in worst.items():
        if what in equal:
            continue
        bound = max(gap.bound for gap in gaps.values())
        values = " | ".join(f"{gaps[kind].found:.0e}" if kind in gaps else "" for kind in found)
        lines.append(f"| {what} | {values} | {bound:.0e} |")
    lines.append(f"| {len(equal)} other metrics" + " | 0" * (len(found) + 1) + " |")
    return lines


def _nonsense_table(kinds: Sequence[Kind]) -> Table:
    lines = ["| cells | why they are none |", "|---|---|"]
    for rows in ROWS:
        reason = reason_against(Cell(rows=rows, world=1))
        if reason:
            lines.append(f"| {rows}, 1 process | {reason} |")
    lines += [f"| {name} | {reason} |" for name, reason in cells.NONSENSE.items()]
    lines += [f"| {k.name}: {fault} | {reason} |" for k in kinds for fault, reason in k.nonsense.items()]
    return lines


def _resume_table(found: Mapping[str, Sequence[Gap]]) -> Table:
    lines = ["| stopped on → goes on with | what differs | next gradient |", "|---|---|---|"]
    for name, gaps in found.items():
        next_gradient = [f"{gap.found:.0e}" for gap in gaps if gap.what == "next gradient"] or [
            "the same bits"
        ]
        bits = [gap.what for gap in gaps if not gap.bound and not gap.is_within] or ["nothing"]
        lines.append(f"| {name} | {', '.join(bits)} | {next_gradient[0]} |")
    return lines


def _fault_table(named: Mapping[Kind, Mapping[Fault, str]]) -> Table:
    lines = ["| fault | " + " | ".join(k.name for k in named) + " |", "|---|" + "---|" * len(named)]
    for fault in FAULTS:
        found = [_killer(kind, own.get(fault)) for kind, own in named.items()]
        lines.append(f"| {fault.name} | {' | '.join(found)} |")
    return lines


def _killer(kind: Kind, by: str | None) -> str:
    """What named a fault, without its figures."""
    return "–" if by is None else by.rpartition(": ")[0] or by or "**nothing**"


def with_tables(page: str, tables: Mapping[str, Iterable[str]]) -> str:
    """The page with the table below each `<!-- table: NAME -->` replaced."""
    for name, lines in tables.items():
        before, mark, after = page.partition(f"<!-- table: {name} -->\n")
        assert mark, f"the page has no mark of the table {name}"
        while after.startswith("|"):
            after = after.partition("\n")[2]
        page = "".join([before, mark, *(f"{line}\n" for line in lines), after])
    return page


if __name__ == "__main__":
    sys.exit(main())
