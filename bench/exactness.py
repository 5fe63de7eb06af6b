"""Print how far the gradient of a step moves when the step is cut or laid out in another way.

The reference of each row is the same replayed rollouts in one forward pass. Columns: the relative difference
of the first step's gradient over all tensors, of its worst tensor, and of the update after five AdamW steps.
Completions of one to three rows are those of tests/support/steps.py, the same in all five steps.
Run with `python bench/exactness.py`; it takes about two minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

from covey.batching.pack import pack
from covey.comm import LocalComm
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate
from covey.selftest.compare import far
from covey.types import TrainSample
from support.exactness import update_gap, worst
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, save_model
from support.runs import (
    Result,
    options,
    train_and_watch,
    train_in_processes,
    write_rollouts,
)
from support.steps import CASES, OPTIMIZER, Case, episode_rows, for_case, plan_of, policy

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
# Losses that weigh completions in different ways, over completions of several rows.
OF_EPISODES = ("grpo", "sapo", "luspo", "dr_grpo", "dapo")
CUT_EPISODES = (
    ("row by row", {"stream": "padded", "max_tokens": 1}),
    ("packed", {"stream": "packed", "max_tokens": 60}),
    ("prefix", {"stream": "prefix", "max_tokens": 45}),
    ("2 ranks", {"world": 2, "max_tokens": 50}),
    ("3 ranks", {"world": 3, "max_tokens": 30}),
)
# Below what the rollouts hold, so that the token budget of a forward pass really cuts the step.
BUDGET = {"max_completion_length": 8}


def row(name: str, actual: Result, expected: Result) -> None:
    """One line of the table."""
    got, due = actual.gradients[0], expected.gradients[0]
    passes = f"{expected.forwards[0]} -> {actual.forwards[0]}"
    figures = far(got, due), worst(got, due), update_gap(actual, expected)
    sys.stdout.write(f"{name:<48} {passes:>8} " + " ".join(f"{figure:9.1e}" for figure in figures) + "\n")
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


def five_steps(rows: Sequence[TrainSample], case: Case, **changes: Any) -> Result:
    """Five AdamW steps on the same rows; the shares of several ranks are added up in this process."""
    plan = plan_of(**changes)
    plan = replace(plan, completions_per_rank=plan.completions_per_rank // plan.world)
    backend, comm = SingleBackend(policy(plan.stream), OPTIMIZER), LocalComm()
    before = {name: weight.detach().clone() for name, weight in backend.masters.each()}
    gradients, forwards = [], []
    for _ in range(5):
        batches = [b for rank in range(plan.world) for b in pack(rows, replace(plan, rank=rank), 0)]
        for batch in batches:
            accumulate(batch, backend, case.config, comm)
        gradients.append({name: g.detach().clone() for name, g in backend.masters.gradients().items()})
        forwards.append(sum(len(batch.micro_batches) for batch in batches))
        backend.step(1e-3)
    after = {name: weight.detach().clone() for name, weight in backend.masters.each()}
    return Result(gradients, before, after, [], forwards, 0)


def episodes() -> None:
    """Completions of one to three rows, in one forward pass against other cuts."""
    given = episode_rows()
    for loss in OF_EPISODES:
        case = CASES[f"{loss}, token"]
        rows = for_case(given, case)
        whole = five_steps(rows, case)
        for name, changes in CUT_EPISODES:
            row(f"{loss}, 1-3 rows: whole against {name}", five_steps(rows, case, **changes), whole)


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
    episodes()


if __name__ == "__main__":
    main()
