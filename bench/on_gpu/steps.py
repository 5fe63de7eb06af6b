"""Part 4: whole GRPO steps of covey with either engine and, where it can be imported, of TRL."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from on_gpu.machine import device, say

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


def steps(small: bool, trl: str | None) -> None:
    """Print seconds a step of every side; `trl` is the Python of an environment with TRL, None this one."""
    case = SMALL if small else FULL
    say(f"GRPO steps on {device()}: {case.says}")
    say(f"{'side':<18} {'s/step':>8} {'rollout s':>9} {'tokens/s':>10} {'GB':>6}")
    sides = {"covey, native": {"engine": "native"}, "covey, generate": {"engine": "generate"}}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for name, options in sides.items():
            _side(name, "covey", sys.executable, replace(case, options=options), work)
        if trl is not None or importlib.util.find_spec("trl") is not None:
            _side("TRL", "trl", trl or sys.executable, case, work)
        else:
            say("TRL                is not installed here; --trl PYTHON names an environment that has it")


def _side(name: str, side: str, python: str, case: Case, work: Path) -> None:
    spec, run = work / "case.json", work / name.replace(", ", "-")
    spec.write_text(json.dumps(prepare(case, work)))
    run.mkdir()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(COMPARE / f"side_{side}.py"), str(spec), str(run / "result.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        say(f"{name:<18} failed: {(done.stderr or done.stdout)[-600:]}")
        return
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    ends, skipped = found["ends"], case.warmup
    seconds = ends[-1] - ends[skipped - 1]
    rollouts = found["rollout_s"][skipped:]
    rate = sum(found["tokens"][skipped:]) / seconds
    step_s, rollout_s = seconds / (len(ends) - skipped), sum(rollouts) / len(rollouts)
    say(f"{name:<18} {step_s:>8.3f} {rollout_s:>9.3f} {rate:>10,.0f} {found['peak_bytes'] / 1e9:>6.1f}")
