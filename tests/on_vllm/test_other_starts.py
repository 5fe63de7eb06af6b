"""vLLM with adapters, and with workers in a process of its own, as a server has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.types import Receipt
from support.vllm_learner import Learner, prompts, request_of, sampled

pytestmark = pytest.mark.vllm

RANK, ALPHA, TARGETS = 4, 8, ("q_proj", "v_proj", "up_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": list(TARGETS),
}
CLOSE = 1e-4


def adapter(learner: Learner, seed: int) -> dict[str, Tensor]:
    """Matrices of an adapter under peft's names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in learner.given.items():
        if not name.endswith(tuple(f"{t}.weight" for t in TARGETS)):
            continue
        before = f"base_model.model.{name.removesuffix('.weight')}"
        rows, columns = weight.shape
        found[f"{before}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=generator)
        found[f"{before}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    return found


def merged(learner: Learner, matrices: dict[str, Tensor]) -> Learner:
    """The model with the adapter added."""
    given = dict(learner.given)
    for name in [n for n in matrices if ".lora_A." in n]:
        b = matrices[name.replace(".lora_A.", ".lora_B.")]
        base = name.removeprefix("base_model.model.").replace(".lora_A", "")
        given[base] = given[base] + ALPHA / RANK * b @ matrices[name]
    return Learner(learner.policy, given)


def test_adapters(start, learner: Learner) -> None:
    """One after the other under names of their own, whole weights beneath them, and none at the end."""
    requests = [request_of(p, i) for i, p in enumerate(prompts())]
    with start(lora_rank=RANK) as engine:
        assert learner.agrees_with(engine.publish(learner.weights(), 0))
        names, directories = [], []
        for version in (1, 2, 2):
            matrices = adapter(learner, version)
            receipt = engine.publish_adapter(iter(matrices.items()), version, CONFIG)
            assert receipt == Receipt(version=version, unread=tuple(matrices))
            completions = sampled(engine, requests)
            own = merged(learner, matrices)
            assert max(map(own.gap, requests, completions)) < CLOSE
            assert max(map(learner.gap, requests, completions)) > 0.01
            assert {v for c in completions for v in c.versions} == {version}
            names.append(engine._adapter.lora_name)
            directories.append(Path(engine._adapter.lora_path))
        assert len(set(names)) == 3 and [n.partition(".")[0] for n in names] == [
            "covey@1",
            "covey@2",
            "covey@2",
        ]
        assert [d.exists() for d in directories] == [False, False, True]
        assert engine.publish(learner.weights(), 3).version == 3
        assert learner.gaps(engine, requests) < CLOSE
        assert not directories[-1].exists() and not engine._llm.llm_engine.list_loras()


def test_workers_in_a_process_of_their_own(start, learner: Learner) -> None:
    """Weights go through files in memory; nothing of a former publish is left."""
    requests = [request_of(p, i) for i, p in enumerate(prompts())]
    before = set(Path("/dev/shm").glob("covey-publish-*"))
    with start(own_processes=True, has_weights=True) as engine:
        # It has read the model's own weights.
        completions = sampled(engine, requests)
        assert {v for c in completions for v in c.versions} == {-1}
        assert max(map(learner.gap, requests, completions)) < CLOSE
        for version in (1, 2):
            other = learner.changed(version)
            assert other.agrees_with(engine.publish(other.weights(), version))
            assert other.gaps(engine, requests) < CLOSE
    assert set(Path("/dev/shm").glob("covey-publish-*")) == before
