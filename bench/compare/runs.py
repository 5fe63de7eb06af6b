"""Run the sides of a case in processes of their own, and say what each run came to."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import Case, prepare

HERE = Path(__file__).parent
THREADS = str(min(2, os.cpu_count() or 1))
# Longest a run may take; one that does not end by then is a dash in the table.
_LIMIT_S = 3600
NAMES: Mapping[str, str] = {"covey": "covey", "trl": "TRL", "swift": "ms-swift"}
# ms-swift generates in a second thread, and the first one's idle workers would hold the processors it needs.
# It asks its hub for a list of files whatever it trains on; a refused connection spares the wait.
_NOWHERE = "http://127.0.0.1:9"
_OWN_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "swift": {"OMP_WAIT_POLICY": "passive", "USE_HF": "1", "http_proxy": _NOWHERE, "https_proxy": _NOWHERE}
}


class SideFailed(Exception):
    """A process of a side ended in an error or ran too long; the message is its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run comes to over its steps behind the warm-up; `update_s` is what of a step is neither
    rollout nor reward. `total_s` is the whole run's."""

    step_s: float
    rollout_s: float
    reward_s: float
    update_s: float
    completions_per_s: float
    tokens_per_s: float
    peak_gb: float
    steps: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of every run of a side on a case, in order, and the raw results; `failed` says why there
    are none."""

    figures: tuple[Figures, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()
    failed: str = ""

    def median(self, name: str) -> float:
        """The median of one figure over the runs."""
        return float(statistics.median(getattr(run, name) for run in self.figures))


def run_script(script: str, spec: Path, python: str) -> Any:
    """Run `script SPEC RESULT` in an empty folder beside the spec, and return what it wrote.

    Raises SideFailed.
    """
    folder = spec.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    result = folder / "result.json"
    side = script.removesuffix(".py").rpartition("_")[2]
    command = [python, str(HERE / script), str(spec), str(result)]
    try:
        done = subprocess.run(
            command, env=_environment(side), capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SideFailed(f"no end within {_LIMIT_S} s") from error
    if done.returncode != 0:
        raise SideFailed(f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found = json.loads(result.read_text())
    shutil.rmtree(folder)
    return found


def _environment(side: str) -> dict[str, str]:
    """The threads of the comparison, offline."""
    return {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **_OWN_ENVIRONMENT.get(side, {}),
    }


def run_side(case: Case, side: str, python: str, work: Path) -> Mapping[str, Any]:
    """The raw result of one run of a side. Raises SideFailed."""
    spec = work / f"{case.name}.json"
    spec.write_text(json.dumps(prepare(case, work)))
    result: Mapping[str, Any] = run_script(f"side_{side}.py", spec, python)
    return result


def measure(case: Case, work: Path, pythons: Mapping[str, str], repeats: int) -> dict[str, Measured]:
    """Run the sides in turns, with another seed each time, ms-swift not in the last of several turns; a side
    other than covey that fails is left out from then on."""
    results: dict[str, list[Mapping[str, Any]]] = {side: [] for side in pythons}
    failed: dict[str, str] = {}
    turns = min(repeats, case.most_runs or repeats)
    for number in range(turns):
        # In turns, and in the other order each time: the machine's speed drifts.
        for side in list(pythons)[:: 1 if number % 2 else -1]:
            if side in failed or (side == "swift" and 0 < number == turns - 1):
                continue
            try:
                seeded = replace(case, seed=case.seed + number)
                results[side].append(run_side(seeded, side, pythons[side], work))
            except SideFailed as error:
                if side == "covey":
                    raise
                failed[side] = str(error).strip().splitlines()[-1]
    return {
        side: Measured(failed=failed[side])
        if side in failed
        else Measured(figures=tuple(figures(case, r) for r in results[side]), results=tuple(results[side]))
        for side in pythons
    }


def figures(case: Case, result: Mapping[str, Any]) -> Figures:
    """What one run comes to: the steps behind the warm-up."""
    ends, skipped = result["ends"], case.warmup
    steps = len(ends) - skipped
    seconds = ends[-1] - ends[skipped - 1]
    rollout_s = statistics.mean(result["rollout_s"][skipped:])
    reward_s = statistics.mean(result["reward_s"][skipped:])
    completions = case.per_device_train_batch_size * case.gradient_accumulation_steps
    return Figures(
        step_s=seconds / steps,
        rollout_s=rollout_s,
        reward_s=reward_s,
        update_s=seconds / steps - rollout_s - reward_s,
        completions_per_s=completions * steps / seconds,
        tokens_per_s=sum(result["tokens"][skipped:]) / seconds,
        peak_gb=result["peak_bytes"] / 1e9,
        steps=len(ends),
        total_s=ends[-1] - result["started"],
    )
