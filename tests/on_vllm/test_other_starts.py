"""vLLM with adapters, and with workers in a process of its own, as a server has it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covey.checksums import checksum
from support.engines import sampled
from support.vllm_learner import Learner, prompts, request_of

pytestmark = pytest.mark.vllm

RANK, TARGETS = 4, ("q_proj", "v_proj", "o_proj", "up_proj")
CLOSE = 1e-4


def adapter(learner: Learner, seed: int) -> dict[str, Tensor]:
    """Matrices of an adapter under peft's names, as a backend gives them: the update is B @ A."""
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
        given[base] = given[base] + b @ matrices[name]
    return Learner(learner.policy, given)


def test_adapters(start, learner: Learner) -> None:
    """One after the other under names of their own, whole weights beneath them, and none at the end."""
    requests = [request_of(p, i) for i, p in enumerate(prompts())]
    with start(lora_rank=RANK) as engine:
        assert engine.capabilities.adapter_rank == 8 and engine.held_base() == ""
        with pytest.raises(ValueError, match="has not received its base model"):
            engine.publish(iter(adapter(learner, 1).items()), 0)
        assert learner.agrees_with(engine.publish(learner.weights(), 0))
        base = engine.held_base()
        names, directories = [], []
        for version in (1, 2, 2):
            matrices = adapter(learner, version)
            with_base = learner.weights() if version == 1 else iter(())
            receipt = engine.publish(chain(with_base, matrices.items()), version)
            held = {n: c for n, c in receipt.fingerprints.items() if n in matrices}
            assert held == {name: checksum(tensor) for name, tensor in matrices.items()}
            named = receipt.fingerprints.keys() | set(receipt.unread)
            assert named == learner.given.keys() | matrices.keys() and engine.held_base() == base
            completions = sampled(engine, requests)
            own = merged(learner, matrices)
            assert max(map(own.gap, requests, completions)) < CLOSE
            assert max(map(learner.gap, requests, completions)) > 0.01
            assert {v for c in completions for v in c.versions} == {version}
            names.append(engine._adapter.lora_name)
            directories.append(Path(engine._adapter.lora_path))
        assert len(set(names)) == 3
        assert [n.partition(".")[0] for n in names] == ["covey@1", "covey@2", "covey@2"]
        assert [d.exists() for d in directories] == [False, False, True]
        assert engine._llm.llm_engine.list_loras() == {engine._adapter.lora_int_id}
        with pytest.raises(ValueError, match=r"model.norm.weight was sent after the matrices of an adapter"):
            engine.publish(chain(matrices.items(), [("model.norm.weight", torch.ones(2))]), 3)
        too_high = {n: t.repeat(3, 1) if "_A" in n else t.repeat(1, 3) for n, t in matrices.items()}
        with pytest.raises(ValueError, match="rank 12 was sent, but this vLLM accepts adapters up to rank 8"):
            engine.publish(iter(too_high.items()), 3)
        with pytest.raises(RuntimeError, match="no weights"):
            engine.submit(requests[0])
        assert engine.publish(learner.weights(), 3).version == 3
        assert learner.gaps(engine, requests) < CLOSE
        assert not directories[-1].exists() and not engine._llm.llm_engine.list_loras()


def test_more_prompts_than_one_step_computes(start, learner: Learner) -> None:
    """Each is computed in one step: with a seed vLLM's build for CPUs ends at one of two."""
    asked = [request_of([n, *range(300), *range(300), *range(300)], n) for n in range(8)]
    with start(max_model_len=1024, max_num_seqs=8, cache_bytes=256 << 20) as engine:
        engine.publish(learner.weights(), 0)
        assert learner.gaps(engine, asked) < CLOSE


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
