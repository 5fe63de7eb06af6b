"""The figure of a run: did the reward rise, and what else changed meanwhile."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.errors import CoveyError
from covey.telemetry.files import read_metrics
from covey.telemetry.line import format_number
from covey.texts import tr
from covey.texts.numbers import told
from covey.types import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _DPI = (10.0, 6.25), 160
_INK, _QUIET, _GRID = "#222222", "#6b6b6b", "#e6e6e6"
# Okabe and Ito's palette, which colour-blind readers can tell apart; the reward itself is blue.
_REWARD = "#0072B2"
_PARTS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# For names and titles in Chinese, Japanese or Korean, where one of these is installed.
_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
_LONGEST_LABEL = 16
_MAX_PARTS = len(_PARTS) * len(_DASHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric over steps, without the steps at which it has no finite value."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def plot_rewards(metrics_path: Path, png: Path, title: str = "") -> None:
    """Plot metrics.jsonl as a PNG of 1600 x 1000 pixels.

    Above, the reward of each step with its smoothed course and that of each reward part; below, the length
    of completions and the share of groups with signal (the entropy, where that is not recorded). `title`
    names the run. Raises CoveyError where no step has a reward.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics_path)
    reward = series(records, "reward")
    if not reward.steps:
        raise CoveyError(
            tr("{path} has no step with a reward, so there is nothing to plot.", path=metrics_path)
        )
    parts = part_series(records, reward)
    style: Any = {
        "font.family": _fonts(),
        "font.size": 10,
        "text.parse_math": False,
        "axes.unicode_minus": True,
    }
    with rc_context(style):
        figure = Figure(figsize=_INCHES, dpi=_DPI, facecolor="white", layout="constrained")
        canvas = FigureCanvasAgg(figure)
        panels = figure.subplot_mosaic([["reward", "reward"], ["length", "signal"]], height_ratios=(2.6, 1))
        _plot_rewards(panels["reward"], reward, parts)
        lengths = series(records, "completions/mean_length")
        _plot_small(panels["length"], lengths, "Completion length", "tokens")
        _plot_signal(panels["signal"], records)
        heading = f"{_shorten(title or 'Reward', 70)}\n{summary(reward)}"
        figure.suptitle(heading, x=0.01, ha="left", fontsize=13, color=_INK)
        png.parent.mkdir(parents=True, exist_ok=True)
        temporary = png.with_name(f".tmp-{png.name}")
        try:
            with warnings.catch_warnings():
                # A letter that no installed font has is drawn as a box; that is worth no warning in a run.
                warnings.filterwarnings("ignore", message="Glyph .* missing from font")
                canvas.print_png(temporary)
            os.replace(temporary, png)
        finally:
            temporary.unlink(missing_ok=True)


Picture = tuple[Any, str]
"""A PIL image, and what stands above it."""


def draw_pictures(png: Path, pictures: Sequence[Picture]) -> None:
    """Draw pictures side by side, each below its text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(pictures), 3.2), layout="constrained")
    for axes, (image, text) in zip(figure.subplots(1, len(pictures)), pictures, strict=True):
        axes.imshow(image)
        axes.axis("off")
        axes.set_title(text, fontsize=9, color=_INK)
    figure.savefig(png, dpi=_DPI)


def series(records: Sequence[StepRecord], name: str) -> Series:
    """Return a metric over steps; steps without a finite value of it are left out."""
    points = [(r.step, m.value) for r in records if (m := r.metrics.get(name)) is not None]
    finite = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    return Series(name=name, steps=tuple(s for s, _ in finite), values=tuple(v for _, v in finite))


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean around each value: of a twelfth of all values, at most 60, to each side of it. Fewer
    than 24 values come back as they are."""
    radius = min(len(values) // 12, 60)
    if radius < 2:
        return list(values)
    from pandas import Series as Column

    return list(Column(values).rolling(2 * radius + 1, center=True, min_periods=1).mean())


def summary(reward: Series) -> str:
    """Return the run in a sentence: the mean reward of the first and of the last tenth of its steps."""
    first, last = _tenths(reward)
    part = "tenth" if len(reward.steps) >= 20 else "step"
    texts = [format_number(v) for v in (first, last)]
    if texts[0] == texts[1]:
        texts = [*told(first, last, digits=3)]
    start, end = (f"{v} in the {which} {part}" for v, which in zip(texts, ("first", "last"), strict=True))
    return f"Mean reward {start}, {end}; {reward.steps[-1]:,} steps"


def _tenths(line: Series) -> tuple[float, float]:
    """Return the means of the first and of the last tenth of the values."""
    tenth = max(1, len(line.values) // 10)
    return math.fsum(line.values[:tenth]) / tenth, math.fsum(line.values[-tenth:]) / tenth


def part_series(records: Sequence[StepRecord], reward: Series) -> list[Series]:
    """Return the reward parts by name, then the rewards of tasks; a lone one that is the reward itself adds
    nothing and is left out."""
    there = sorted({n for r in records for n in r.metrics})
    names = [n for n in there if n.startswith("rewards/") and n.endswith("/mean")]
    names += [n for n in there if n.startswith("tasks/") and n.count("/") == 2 and n.endswith("/reward")]
    parts = [s for s in (series(records, name) for name in names) if s.steps]
    if len(parts) == 1 and parts[0].values == reward.values:
        return []
    return parts[:_MAX_PARTS]


def _plot_rewards(axes: Axes, reward: Series, parts: Sequence[Series]) -> None:
    lines = [(reward, _REWARD, _DASHES[0], "reward")]
    for index, part in enumerate(parts):
        lines.append((part, _PARTS[index % len(_PARTS)], _DASHES[index // len(_PARTS)], _label(part)))
    axes.plot(reward.steps, reward.values, color=_REWARD, linewidth=0.8, alpha=0.35)
    courses = [smooth(line.values) for line, *_ in lines]
    for (line, color, dashes, label), course in zip(lines, courses, strict=True):
        width, above = (2.6, 3.0) if line is reward else (1.6, 2.0)
        label = f"{_shorten(label, _LONGEST_LABEL)}  {format_number(_tenths(line)[1])}"
        axes.plot(
            line.steps, course, color=color, linestyle=dashes, linewidth=width, label=label, zorder=above
        )
    _finish(axes, reward.steps, num_ticks=8)
    lowest, highest = (pick(pick(line.values) for line, *_ in lines) for pick in (min, max))
    if 0 <= lowest < highest / 2:
        axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, labelcolor="linecolor")
    key = " (pale: each step; dark: smoothed)" if courses[0] != list(reward.values) else ""
    axes.set_xlabel("optimizer step" + key, color=_QUIET)
    axes.set_ylabel("mean reward", color=_QUIET)


def _label(part: Series) -> str:
    if part.name.startswith("tasks/"):
        return f"task {part.name.removeprefix('tasks/').removesuffix('/reward')}"
    return part.name.removeprefix("rewards/").removesuffix("/mean")


def _plot_signal(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Plot the share of groups with signal, or the entropy where no step records the former."""
    no_signal = series(records, "frac_reward_zero_std")
    if no_signal.steps:
        share = Series(
            name="signal",
            steps=no_signal.steps,
            values=tuple(100 * (1 - value) for value in no_signal.values),
        )
        _plot_small(axes, share, "Groups whose rewards differ", "%")
        axes.set_ylim(0, 103)
        return
    _plot_small(axes, series(records, "entropy"), "Entropy", "nats per token")


def _plot_small(axes: Axes, line: Series, title: str, unit: str) -> None:
    axes.set_title(f"{title}, {unit}", loc="left", fontsize=10, color=_INK, pad=6)
    if not line.steps:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=_QUIET)
        axes.set_axis_off()
        return
    axes.plot(line.steps, line.values, color=_QUIET, linewidth=0.7, alpha=0.4)
    axes.plot(line.steps, smooth(line.values), color=_INK, linewidth=1.5)
    _finish(axes, line.steps, num_ticks=5)
    axes.set_xlabel("optimizer step", color=_QUIET)


def _finish(axes: Axes, steps: Sequence[int], num_ticks: int) -> None:
    """Leave of the frame what helps to read a value."""
    from matplotlib.ticker import MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_xlim(min(0, steps[0]), max(steps[-1], steps[0] + 1))


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in installed)]


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
