"""A publisher that sends vLLM an adapter alone: what is sent, and each fault named at the publish itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.models.adapter_shapes import LoraSettings, is_of_adapter
from covey.models.load import load_adapted
from covey.models.lora import tied_names
from covey.quickstart import task
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.publisher import Publisher
from covey.rollout.vllm.engine import VllmEngine
from support.steps import OPTIMIZER

pytestmark = pytest.mark.vllm

RANK, FP32 = 4, torch.float32
VERSIONS = count()


@pytest.fixture(scope="module")
def engine(start) -> Iterator[VllmEngine]:
    with start(lora_rank=RANK) as started:
        yield started


@pytest.fixture(scope="module")
def backend() -> SingleBackend:
    """A learner of an adapter on every linear layer of the built-in model."""
    policy = load_adapted(
        task.MODEL_DIR,
        LoraSettings(rank=RANK, alpha=6),
        adapter=None,
        seed=0,
        compute_dtype=FP32,
        device=torch.device("cpu"),
        disable_dropout=True,
    )
    return SingleBackend(policy, OPTIMIZER, compute_dtype=FP32)


@pytest.fixture(scope="module")
def publisher(engine: VllmEngine, backend: SingleBackend) -> Publisher:
    """Of which the engine has the base, and the bound of the canary is learned."""
    return new_publisher(engine, backend)


def new_publisher(engine: VllmEngine, backend: SingleBackend) -> Publisher:
    view = learners_view(backend, lambda: None)
    requests = canary_requests(backend.policy.vocab)
    canary = Canary(requests=requests, view=view, bound=Bound(FP32, FP32))
    found = Publisher(backend, engine, LocalComm(), canary=canary, tied=tied_names(backend.policy))
    publish(found)
    return found


def publish(publisher: Publisher) -> Any:
    with publisher.serve(next(VERSIONS)):
        pass
    return publisher.last


def stopped(publisher: Publisher) -> Any:
    with pytest.raises(GuardStop) as stop:
        publish(publisher)
    return stop.value.finding


@pytest.fixture
def stepped(backend: SingleBackend) -> int:
    """The learner after a step; the bytes of its adapter."""
    own = [p for n, p in backend.policy.named_parameters() if is_of_adapter(n)]
    with torch.no_grad():
        for parameter in own:
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return sum(4 * p.numel() for p in own)


def test_the_base_goes_once(publisher: Publisher, stepped: int, backend: SingleBackend) -> None:
    first = publisher.taken()[-1]
    base = sum(4 * p.numel() for n, p in backend.policy.named_parameters() if not is_of_adapter(n))
    assert first.num_bytes == base + stepped
    last = publish(publisher)
    assert last.num_bytes == stepped < base / 10
    assert last.num_tensors == first.num_tensors
    assert 0 < last.canary_gap < 1e-4


def test_another_run_finds_the_base_there(engine: VllmEngine, backend: SingleBackend, stepped: int) -> None:
    last = new_publisher(engine, backend).last
    assert last is not None and last.num_bytes == stepped


def test_an_adapter_that_is_not_applied(
    publisher: Publisher, engine: VllmEngine, stepped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine._llm.llm_engine.add_request
    monkeypatch.setattr(
        engine._llm.llm_engine, "add_request", lambda *a, **k: real(*a, **{**k, "lora_request": None})
    )
    found = stopped(publisher)
    assert found.code == "F152" and "an adapter is not applied" in found.cause
    monkeypatch.undo()
    assert publish(publisher).canary_gap < 1e-4


def test_an_adapter_that_is_not_replaced(
    publisher: Publisher, engine: VllmEngine, stepped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one stays, and is sampled with."""
    publish(publisher)
    former = engine._adapter
    monkeypatch.setattr(engine, "_use_adapter", lambda files, version=-1: None)
    with torch.no_grad():
        for name, parameter in publisher._owner.policy.named_parameters():  # type: ignore[attr-defined]
            if is_of_adapter(name):
                parameter.mul_(1.5)
    found = stopped(publisher)
    assert engine._adapter is former
    assert found.code == "F151" and "held with different values: base_model.model." in found.seen
    assert "are still those of version" in found.cause
    monkeypatch.undo()
    assert publish(publisher).canary_gap < 1e-4


def test_an_adapter_that_vllm_does_not_load(
    publisher: Publisher, engine: VllmEngine, stepped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._llm.llm_engine, "add_lora", lambda request: True)
    found = stopped(publisher)
    assert found.code == "F151" and "missing: base_model.model." in found.seen
    monkeypatch.undo()
    assert publish(publisher).canary_gap < 1e-4


def test_a_matrix_that_arrives_as_zeros(
    publisher: Publisher, engine: VllmEngine, stepped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, name = engine._written, "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"

    def written(matrices):
        return real({n: 0 * t if n == name else t for n, t in matrices.items()})

    monkeypatch.setattr(engine, "_written", written)
    found = stopped(publisher)
    assert found.code == "F151" and found.seen.endswith(f"held with different values: {name}")
