"""When vLLM sleeps and wakes, and what a publish asks of it in which order.

A stand-in takes the place of vLLM's `LLM`, whose build for CPUs does not sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from covey.rollout.vllm import library, workers
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.settings import VllmSettings
from covey.types import GenerationRequest, SamplingParams, TurnId

WEIGHTS = {"a": torch.ones(3), "b": torch.zeros(2, 2)}


class StandIn:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.can_reset = True
        self.llm_engine = SimpleNamespace(
            add_request=lambda *a, **k: self.calls.append("add"),
            abort_request=lambda ids: self.calls.append(f"abort {','.join(ids)}"),
        )

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {','.join(tags)}")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append(method)
        if method == "covey_load":
            return [list(args[0])]
        return [{}]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append("reset")
        return self.can_reset


def engine_of(level: int, **changes: Any) -> tuple[VllmEngine, StandIn]:
    stand_in = StandIn()
    given = {"model": "m", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "on_gpu": True}
    return VllmEngine(VllmSettings(**{**given, "sleep_level": level, **changes}), stand_in), stand_in


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "sampling_params", lambda request, listed: None)


def request() -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=3, stop_token_ids=()),
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0),
    )


PUBLISH = ["covey_load", "covey_parts", "reset"]


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_before_they_are_loaded_and_the_cache_after(level: int) -> None:
    engine, asked = engine_of(level)
    engine.publish(iter(WEIGHTS.items()), 0)
    assert asked.calls == PUBLISH
    engine.rest()
    engine.rest()
    engine.publish(iter(WEIGHTS.items()), 1)
    assert asked.calls[3:] == [
        f"sleep {level}", "wake weights", "covey_load", "covey_parts", "wake kv_cache", "reset",
    ]  # fmt: skip


def test_at_level_1_the_same_weights_wake_for_a_request() -> None:
    engine, asked = engine_of(1)
    engine.publish(iter(WEIGHTS.items()), 0)
    engine.rest()
    engine.submit(request())
    assert asked.calls[3:] == ["sleep 1", "wake weights", "wake kv_cache", "add"]
    assert not engine.capabilities.forgets


def test_at_level_2_nothing_is_sampled_from_what_was_dropped() -> None:
    """It would be garbage. The publisher sends the same version again."""
    engine, _ = engine_of(2)
    engine.publish(iter(WEIGHTS.items()), 0)
    engine.submit(request())
    engine.abort([0])
    list(engine.results())
    engine.rest()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(request())
    assert engine.capabilities.forgets


def test_it_does_not_sleep_while_requests_run_nor_on_a_cpu_nor_at_level_0() -> None:
    engine, asked = engine_of(1)
    engine.publish(iter(WEIGHTS.items()), 0)
    engine.submit(request())
    engine.rest()
    assert "sleep 1" not in asked.calls
    for level, on_gpu in ((1, False), (0, True)):
        engine, asked = engine_of(level, on_gpu=on_gpu)
        engine.rest()
        assert asked.calls == []


def test_a_cache_that_stays_is_no_publish() -> None:
    engine, asked = engine_of(0)
    asked.can_reset = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.publish(iter(WEIGHTS.items()), 0)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(request())


def test_a_publish_that_breaks_off_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_of(0)
    engine.publish(iter(WEIGHTS.items()), 0)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", WEIGHTS["a"]
        raise ValueError("the connection ended")

    with pytest.raises(ValueError, match="the connection ended"):
        engine.publish(breaking(), 1)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(request())
    assert asked.calls[-1] == "covey_load"


def test_files_that_find_no_room_are_named_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM's workers are processes of their own, weights go through files in memory."""
    engine, asked = engine_of(0, own_processes=True)
    engine.publish(iter(WEIGHTS.items()), 0)
    monkeypatch.setattr(workers, "memory_directory", lambda: str(tmp_path))
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    asked.calls.clear()
    with pytest.raises(ValueError, match=f"{tmp_path} takes no file of weights: .*No space left"):
        engine.publish(iter(WEIGHTS.items()), 1)
    assert asked.calls == [] and list(tmp_path.iterdir()) == []


def full(tensors: Any, path: Any) -> None:
    """What a file of weights says on a disk without room."""
    raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")
