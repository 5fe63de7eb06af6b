"""Whether the sides do the same work: loss and gradient of one step on the same written rollout.

covey samples a rollout of the quickstart's model, with the rewards that it really gets, and writes it. Each
side then takes its first step on these tokens, with its own advantages, denominators and loss, and the
gradient in front of clipping is compared over all weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import Case, prepare
from runs import NAMES, run_script

# Rows of the data: as many prompts as a step has.
_PROMPTS = 8
_SPLITS = ((64, 1), (16, 4))
HEAD = (
    "| batch × accumulation | side | loss | ‖gradient‖ | ‖Δ‖ / ‖gradient‖ | largest difference |",
    "|---|---|---|---|---|---|",
)
# A step that is done, so that its rate and warm-up do not matter.
_CASE = Case(name="equal-work", says="", steps=1, warmup=0)


def rows(pythons: Mapping[str, str], work: Path) -> list[str]:
    """A row for each side of each split of the step."""
    lines = []
    for batch, accumulation in _SPLITS:
        split = replace(_CASE, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
        found = {side: _gradient(split, side, python, work) for side, python in pythons.items()}
        for side, (loss, gradient) in found.items():
            first = f"{batch} × {accumulation}" if side == "covey" else ""
            cells = [first, NAMES[side], f"{loss:.8f}", *_compared(gradient, found["covey"][1])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gradient(case: Case, side: str, python: str, work: Path) -> tuple[float, Mapping[str, Any]]:
    """The loss and the gradient by name of a side's first step."""
    from safetensors.torch import load_file

    spec = _spec(case, work)
    name = f"{side}-{case.gradient_accumulation_steps}"
    file = work / f"gradient-{name}.safetensors"
    path = work / f"{name}.json"
    rollouts = work / "equal-work-rollouts"
    more = {"rollouts": str(rollouts), "gradient_file": str(file), "sample": not rollouts.is_dir()}
    path.write_text(json.dumps({**spec, **more}))
    result = run_script(f"gradient_{side}.py", path, python)
    return result["loss"], load_file(str(file))


def _spec(case: Case, work: Path) -> dict[str, Any]:
    """The case on the first rows of its data alone, so that every side's first step takes all of them."""
    spec = prepare(case, work)
    few = work / "equal-work.jsonl"
    lines = Path(spec["data_file"]).read_text().splitlines()[:_PROMPTS]
    few.write_text("\n".join(lines) + "\n")
    return {**spec, "data_file": str(few)}


def _compared(gradient: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Norm, relative difference to the reference, and the largest difference of one element."""
    assert gradient.keys() == reference.keys(), sorted(gradient.keys() ^ reference.keys())

    def norm(tensors: Mapping[str, Any]) -> float:
        return float(sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5)

    gap = {name: gradient[name].double() - reference[name].double() for name in reference}
    shown = [f"{norm(gradient):.6f}"]
    if gradient is reference:
        return [*shown, "", ""]
    return [
        *shown,
        f"{norm(gap) / norm(reference):.1e}",
        f"{max(float(t.abs().max()) for t in gap.values()):.1e}",
    ]
