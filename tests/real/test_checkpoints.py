"""What runs on a real model leave: resumes, checkpoints, adapters, merges and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from journeys.helpers import metrics, succeed
from support.real import real
from support.real_runs import SAVED, STEPS, answer, train


def test_a_resumed_run_is_the_whole_run(data, tmp_path):
    model = real("smollm2")
    options = {"tuner_type": "lora", "save_only_model": False, "save_steps": 10}
    whole = train(model, data, tmp_path / "whole", **options)
    train(model, data, tmp_path / "cut", **options, stop_after_steps=SAVED)
    run = train(model, data, tmp_path / "cut", **options, resume_from_checkpoint="latest")
    assert metrics(run) == metrics(whole)
    mine, theirs = (load_file(r / f"checkpoint-{STEPS}" / "adapter_model.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> dict[str, Path]:
    """A run of all weights and one of an adapter, each of one step."""
    root, model = tmp_path_factory.mktemp("runs"), real("smollm2")
    few = {"max_steps": 1, "learning_rate": 1e-6}
    return {
        "full": train(model, data, root / "full", **few) / "checkpoint-1",
        "adapter": train(model, data, root / "lora", tuner_type="lora", **few) / "checkpoint-1",
    }


@pytest.mark.parametrize("kind", ["checkpoint", "adapter", "merge", "float32 merge", "export"])
def test_what_a_run_leaves_stops_where_the_run_stopped(kind, runs, tmp_path):
    model, made = real("smollm2"), tmp_path / "made"
    match kind:
        case "checkpoint":
            made = runs["full"]
        case "adapter":
            made = runs["adapter"]
        case "export":
            succeed("export", str(runs["full"]), "--output_dir", str(made))
        case _:
            more = ["--dtype", "float32"] if kind == "float32 merge" else []
            succeed("export", str(runs["adapter"]), "--merge", "--output_dir", str(made), *more)
    ids = answer(made, model)
    assert len(ids) < 40 and ids[-1] == 2
