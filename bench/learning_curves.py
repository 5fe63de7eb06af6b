"""Trains with every loss, baseline, scale and divergence, and writes the table and the figure of
docs/learning-curves.md: `make learning-curves`. One run at a time; tests/support/learning.py has the options.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from support.learning import CONTROL, CURVES, WINDOW, course, end, first_above, start

Courses = Mapping[str, Mapping[str, Sequence[float]]]
DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURE = DOCS / "learning-curves.md", DOCS / "learning-curves.svg"
LEVEL = 0.75
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
QUIET, USUAL = "#9a9a9a", "dapo"


def courses() -> dict[str, dict[str, list[float]]]:
    """Every run, one after the other."""
    found: dict[str, dict[str, list[float]]] = {}
    for section, curves in {**CURVES, "control": {"learning_rate 0": CONTROL}}.items():
        for name, options in curves.items():
            with tempfile.TemporaryDirectory() as work, redirect_stdout(StringIO()):
                values = course(options, Path(work) / "run")
            found.setdefault(section, {})[name] = values
            sys.stdout.write(f"{section:28}{name:40}{start(values):.3f} -> {end(values):.3f}\n")
            sys.stdout.flush()
    return found


def with_table(text: str, found: Courses) -> str:
    """The page with the rows of its table made anew."""
    head, rule, rest = text.partition("|---|---|---|---|---|\n")
    assert rule, "the page has no such table"
    return head + rule + "\n".join(_rows(found)) + "\n" + rest[rest.index("\n\n") + 1 :]


def _rows(found: Courses) -> list[str]:
    rows = []
    for section, curves in found.items():
        rows.append(f"| **{section}** | | | | |")
        for name, values in curves.items():
            step = first_above(values, LEVEL) or "–"
            first, last = start(values), end(values)
            rows.append(f"| {name} | {step} | {first:.2f} | {last:.2f} | {last - first:+.2f} |")
    return rows


def figure(found: Courses, path: Path) -> None:
    """One panel a section, with the usual run and the control in each."""
    panels = [(section, curves) for section, curves in found.items() if section != "control"]
    quiet = {f"{USUAL}, the usual run": found["loss_type"][USUAL], **found["control"]}
    style: Any = {"font.size": 9, "svg.hashsalt": "covey", "svg.fonttype": "none"}
    with rc_context(style):
        drawn = Figure(figsize=(11, 3.4 * -(-len(panels) // 2)), facecolor="white", layout="constrained")
        for number, (section, curves) in enumerate(panels, start=1):
            axes = drawn.add_subplot(-(-len(panels) // 2), 2, number)
            axes.set_title(section, loc="left", fontweight="bold")
            for dashes, (name, values) in zip(("-", ":"), quiet.items(), strict=True):
                axes.plot(*_means(values), color=QUIET, linestyle=dashes, linewidth=2.4, label=name)
            own = {n: v for n, v in curves.items() if (section, n) != ("loss_type", USUAL)}
            for index, (name, values) in enumerate(own.items()):
                dashes = ("-", "--")[index // len(COLORS)]
                color = COLORS[index % len(COLORS)]
                axes.plot(*_means(values), color=color, linestyle=dashes, linewidth=1.5, label=name)
            axes.set_ylim(0, 1)
            axes.set_xlabel(f"optimizer step (mean of the last {WINDOW})")
            axes.set_ylabel("share of right answers")
            axes.grid(axis="y", color="#e6e6e6")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=7, ncols=2, loc="lower right", frameon=False)
        FigureCanvasSVG(drawn).print_svg(path, metadata={"Date": None})


def _means(values: Sequence[float]) -> tuple[list[int], list[float]]:
    steps = list(range(WINDOW, len(values) + 1))
    return steps, [sum(values[i - WINDOW : i]) / WINDOW for i in steps]


def main() -> None:
    """Train, draw, write."""
    found = courses()
    figure(found, FIGURE)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
