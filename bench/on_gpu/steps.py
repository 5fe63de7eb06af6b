"""Part 6: whole GRPO steps of covey with its native engine and, where it can be imported, of TRL."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from on_gpu.lines import Found, Lines
from on_gpu.processes import run_limited

COMPARE = Path(__file__).parent.parent / "compare"
sys.path.insert(0, str(COMPARE))

from cases import Case, prepare  # noqa: E402

FULL = Case(
    name="gpu",
    says="0.5B, 64 completions of 256 forced tokens",
    model="500m",
    reward="length",
    per_device_train_batch_size=64,
    max_completion_length=256,
    forced=True,
    steps=3,
    warmup=1,
    dtype="bfloat16",
    learning_rate=1e-6,
)
SMALL = replace(
    FULL,
    says="built-in model, 16 completions of 16 forced tokens",
    model="quickstart",
    per_device_train_batch_size=16,
    max_completion_length=16,
    steps=2,
    dtype="float32",
)


def run(lines: Lines) -> None:
    """Write seconds a step of covey, and of TRL where it can be imported."""
    case = SMALL if lines.small else FULL
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        native = replace(case, options={"engine": "native"})
        lines.case("covey", lambda: _side("covey", native, work, lines), needs_s=20)
        if importlib.util.find_spec("trl") is not None and not lines.small:
            lines.case("TRL", lambda: _side("trl", case, work, lines), needs_s=20)


def _side(side: str, case: Case, work: Path, lines: Lines) -> Found:
    """Three steps by one side, in a process that ends with this part at the latest."""
    spec, folder = work / "case.json", work / side
    spec.write_text(json.dumps(prepare(case, work)))
    folder.mkdir()
    with lines.path.with_name(f"steps-{side}.log").open("w+", encoding="utf-8") as log:
        code = run_limited(
            [sys.executable, str(COMPARE / f"side_{side}.py"), str(spec), str(folder / "result.json")],
            limit_s=lines.left_s,
            log=log,
            environment=os.environ,
        )
        log.seek(0)
        last = (log.read().strip().splitlines() or ["it printed nothing"])[-1]
    if code != 0:
        if code is None:
            raise TimeoutError(f"killed before its {case.steps} steps were done: {last[:200]}")
        if side == "trl":
            raise RuntimeError(f"exit status {code}: {last[:200]}")
        return Found(figures={"exit_status": code}, passed=False, why=f"exit status {code}: {last[:200]}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    ends, skipped = found["ends"], case.warmup
    seconds = ends[-1] - ends[skipped - 1]
    rollouts = found["rollout_s"][skipped:]
    return Found(
        figures={
            "s_a_step": seconds / (len(ends) - skipped),
            "rollout_s": sum(rollouts) / len(rollouts),
            "tokens_per_s": sum(found["tokens"][skipped:]) / seconds,
            "gb": found["peak_bytes"] / 1e9,
        }
    )
