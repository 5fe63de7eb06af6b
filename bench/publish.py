"""Print what a publish takes of a step of a 125 M model, and how much of it is the proof that it worked.

A random model of 125 M parameters trains in float32 on the CPU, and samples from an engine that holds a copy
in the same process: nothing is sent over a network, so what is left is the copying, the checksums on both
sides and the canary. Run with `python bench/publish.py [STEPS]`; it takes some minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from sharding import write_model

from covey.checks.survey import survey
from covey.config.resolve import from_dict
from mutants.faults_publish import samples_from_a_copy
from mutants.harness import train_quietly

_STEPS = 6


def main() -> None:
    """One run; medians over its steps but for the first."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else _STEPS
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        work = Path(folder)
        options = _options(work, num_steps)
        samples_from_a_copy()(patch)
        resolved = from_dict(options, 1)
        with survey(resolved.config, 1) as found:
            train_quietly(options, found)
        metrics, published = _lines(work / "run" / "metrics.jsonl"), _lines(work / "run" / "events.jsonl")
        published = [event for event in published if event["kind"] == "published"]
    _print(metrics[1:], published[1:])


def _options(work: Path, num_steps: int) -> dict[str, Any]:
    write_model(work / "model")
    rows = [{"prompt": f"What is {n}+{n + 3}?"} for n in range(64)]
    (work / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (work / "rewards.py").write_text(
        "def chance(completions, **columns):\n    return [hash(str(c)) % 7 / 7 for c in completions]\n"
    )
    return {
        "model": str(work / "model"),
        "dataset": [str(work / "data.jsonl")],
        "reward_funcs": [f"{work / 'rewards.py'}:chance"],
        "torch_dtype": "float32",
        "num_generations": 8,
        "per_device_train_batch_size": 32,
        "max_completion_length": 64,
        "max_steps": num_steps,
        "save_steps": 1000,
        "learning_rate": 1e-5,
        "output_dir": str(work / "run"),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _print(metrics: list[dict[str, Any]], published: list[dict[str, Any]]) -> None:
    step_s = statistics.median(line["time/step_s"] for line in metrics)
    publish_s = statistics.median(event["seconds"] for event in published)
    parts = {
        "step": step_s,
        "publish, in one process": publish_s,
        "the canary of it": statistics.median(event["canary_s"] for event in published),
        "copies, and checksums of both sides": statistics.median(
            event["seconds"] - event["canary_s"] for event in published
        ),
    }
    sys.stdout.write(f"| | seconds, median of {len(metrics)} | share of a step |\n|---|---|---|\n")
    for name, seconds in parts.items():
        sys.stdout.write(f"| {name} | {seconds:.3f} | {seconds / step_s:.2%} |\n")
    gaps = ", ".join(f"{event['canary_gap']:.2g}" for event in published)
    sys.stdout.write(
        f"\n{published[0]['tensors']} tensors, {published[0]['bytes'] / 1e6:.0f} MB a publish; "
        f"gaps of the canary {gaps}; torch on {torch.get_num_threads()} threads\n"
    )


if __name__ == "__main__":
    main()
