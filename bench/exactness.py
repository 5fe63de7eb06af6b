"""Print how far the gradient of a step moves when the step is cut or laid out in another way.

The reference of each row is the same replayed rollouts in one forward pass. Columns: the relative difference
of the first step's gradient over all tensors, of its worst tensor, and of the update after five AdamW steps.
Run with `python bench/exactness.py`; it takes about a minute on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, save_model
from support.runs import (
    Result,
    difference,
    options,
    relative_difference,
    total_norm,
    train_and_watch,
    train_in_processes,
    write_rollouts,
)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
# Below what the rollouts hold, so that the token budget of a forward pass really cuts the step.
BUDGET = {"max_completion_length": 8}


def row(name: str, actual: Result, expected: Result) -> None:
    """One line of the table."""
    overall, worst = relative_difference(actual.gradients[0], expected.gradients[0])
    moved = total_norm(difference(expected.after, expected.before))
    update = total_norm(difference(actual.after, expected.after)) / moved
    passes = f"{expected.forwards[0]} -> {actual.forwards[0]}"
    sys.stdout.write(f"{name:<48} {passes:>8} {overall:9.1e} {worst:9.1e} {update:9.1e}\n")
    sys.stdout.flush()


def splits(work: Path, replay: Path) -> None:
    """Every loss under every split of its 8 completions."""
    model = save_model("qwen2", work / "model")
    whole_runs = {x: options(model, work / f"whole-{x}", replay, loss_type=x, **BUDGET) for x in LOSSES}
    whole = {loss: train_and_watch(run) for loss, run in whole_runs.items()}
    for loss in LOSSES:
        for batch, accumulation in ((4, 2), (2, 4), (1, 8)):
            cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
            run = options(model, work / f"{loss}-{batch}", replay, loss_type=loss, **cut, **BUDGET)
            row(f"{loss}: (8,1) against ({batch},{accumulation})", train_and_watch(run), whole[loss])
    cases = [(x, b, a) for x in LOSSES for b, a in ((4, 1), (2, 2))]
    runs = [
        options(
            model,
            work / f"ddp-{x}-{b}",
            replay,
            loss_type=x,
            per_device_train_batch_size=b,
            gradient_accumulation_steps=a,
            **BUDGET,
        )
        for x, b, a in cases
    ]
    for (loss, b, a), result in zip(cases, train_in_processes(runs, work / "ddp"), strict=True):
        row(f"{loss}: (8,1) against 2 ranks x ({b},{a})", result, whole[loss])


def layouts(work: Path, replay: Path) -> None:
    """Packed and prefix-shared streams against padded rows, and what the probe keeps a leaking family
    from."""
    for family in (*STREAM_FAMILIES, *LEAKING_FAMILIES):
        model = save_model(family, work / family)
        kinds = ("packed", "prefix") if family in STREAM_FAMILIES else ("packed",)
        padded = train_and_watch(options(model, work / f"{family}-padded", replay), stream="padded")
        for kind in kinds:
            note = "" if family in STREAM_FAMILIES else " (probe refuses)"
            found = train_and_watch(options(model, work / f"{family}-{kind}", replay), stream=kind)
            row(f"{family}: padded against {kind}{note}", found, padded)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    head = f"{'float32, replayed rollouts':<48} {'passes':>8} {'gradient':>9} {'worst':>9} {'update':>9}"
    sys.stdout.write(head + "\n")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        replay = write_rollouts(work / "replay")
        splits(work, replay)
        layouts(work, replay)


if __name__ == "__main__":
    main()
