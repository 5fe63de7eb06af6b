"""Part 3: `covey train` as a user starts it, on the built-in model; what it used is read from its output."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from covey.models.layouts import automatic
from on_gpu.lines import Found, Lines
from on_gpu.machine import device
from on_gpu.processes import run_limited

STEPS = 4
# Logprobs of the engine and of the learner, in the mean; a wrong cache is above 0.1.
MOST_GAP = 0.05
# Codes of the engine's own warnings, among them that recording failed.
_ENGINE_CODES = re.compile(r"\bW17[0-4]\b")


def run(lines: Lines) -> None:
    """Train, then write what the run says of itself, and its steps."""
    with tempfile.TemporaryDirectory() as directory:
        folder, log = Path(directory) / "run", lines.path.with_name("train.log")
        options = ["--model", "quickstart", "--dataset", "quickstart", "--reward_funcs", "accuracy", "format"]
        options += ["--learning_rate", "1e-4", "--max_steps", str(STEPS), "--output_dir", str(folder)]
        with log.open("w", encoding="utf-8") as file:
            code = run_limited(
                [sys.executable, "-m", "covey", "train", *options],
                limit_s=lines.left_s,
                log=file,
                environment=os.environ,
            )
        said = log.read_text(encoding="utf-8", errors="replace")
        lines.case("covey train", lambda: _ended(code, said))
        events = folder / "events.jsonl"
        lines.case("what it used", lambda: used(said, events.read_text(encoding="utf-8")))
        lines.case("steps", lambda: stepped(_read(folder / "metrics.jsonl")))


def _ended(code: int | None, said: str) -> Found:
    last = (said.strip().splitlines() or ["it printed nothing"])[-1]
    why = "" if code == 0 else f"{'killed for time' if code is None else f'exit status {code}'}: {last[:200]}"
    return Found(figures={"exit_status": code}, passed=code == 0, why=why)


def used(said: str, events: str) -> Found:
    """Layout, attention and recordings, from the terminal's lines and the run's events."""
    stream = re.search(r"rows are laid out as: (\w+)", said)
    kernel = re.search(r"attention: (\w+)", said)
    figures = {"stream": stream and stream[1], "attention": kernel and kernel[1]}
    lost = "without CUDA graphs" in said or bool(_ENGINE_CODES.search(events + said))
    if device().type == "cuda":
        figures["recordings"] = "failed" if lost else "in use"
    wanted = {"stream": "prefix", "attention": automatic(device())}
    wrong = [
        f"{name} is {figures[name]} and not {value}"
        for name, value in wanted.items()
        if figures[name] != value
    ]
    if lost:
        wrong.append("recordings failed: see train.log")
    return Found(figures=figures, passed=not wrong, why="; ".join(wrong))


def stepped(metrics: Sequence[dict[str, Any]]) -> Found:
    """Whether every step is there, with finite numbers and the sampler's logprobs near the learner's."""
    name = "sampling/sampling_logp_difference/mean"
    gaps = [line[name] for line in metrics if line.get(name) is not None]
    values = [line[key] for line in metrics for key in ("loss", "grad_norm")]
    wrong = []
    if len(metrics) != STEPS:
        wrong.append(f"{len(metrics)} steps were recorded, not {STEPS}")
    if not all(value is not None and math.isfinite(value) for value in values):
        wrong.append("a loss or a gradient is not finite")
    if not gaps or any(not gap <= MOST_GAP for gap in gaps):
        wrong.append(f"the sampler's logprobs differ by more than {MOST_GAP} in the mean")
    figures: dict[str, Any] = {"steps": len(metrics), "gap_of_logprobs": max(gaps, default=math.nan)}
    for short, key in (("s_a_step", "time/step_s"), ("rollout_s", "time/rollout_s")):
        figures[short] = metrics[-1][key] if metrics else math.nan
    if torch.cuda.is_available():
        figures["peak_gib"] = metrics[-1]["memory/peak_gib"] if metrics else math.nan
    return Found(figures=figures, passed=not wrong, why="; ".join(wrong))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
