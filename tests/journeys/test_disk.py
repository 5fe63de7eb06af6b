"""The bytes that the plan announces against the bytes on the disk, and which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import (
    TOLERANCE,
    assert_announced,
    events,
    flags,
    plan_of,
    rows,
    size_of,
    small,
    succeed,
    write_jsonl,
)
from support.models import save_model

LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 8}
MOVING: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
KINDS: dict[str, dict[str, Any]] = {
    "full, float32": {"torch_dtype": "float32"},
    "full, bfloat16": {"torch_dtype": "bfloat16"},
    "LoRA": LORA,
    "LoRA, bfloat16": {**LORA, "torch_dtype": "bfloat16"},
    "moving reference": {"torch_dtype": "float32", **MOVING},
    "moving reference, bfloat16": {"torch_dtype": "bfloat16", **MOVING},
    "moving reference, LoRA": {**LORA, **MOVING},
    "DoRA": {**LORA, "use_dora": True},
    "LoRA on one module": {**LORA, "target_modules": ["q_proj"]},
    "LoRA and a whole head": {**LORA, "modules_to_save": ["lm_head"]},
    "LoRA and a whole head, bfloat16": {**LORA, "modules_to_save": ["lm_head"], "torch_dtype": "bfloat16"},
}


def options(kind: str, place: Path, **changes: Any) -> dict[str, Any]:
    """A run that saves twice, so that the first checkpoint is reduced to the model."""
    data = write_jsonl(place / "d.jsonl", rows(8))
    # The built-in model has one tensor for head and embedding, of which no copy can be trained.
    is_whole = "modules_to_save" in KINDS.get(kind, {})
    model = str(save_model("llama", place / "model")) if is_whole else "quickstart"
    words = {"model": model, "save_steps": 1, **KINDS.get(kind, {}), **changes}
    return small(data, place / "run", **words)


@pytest.mark.parametrize("kind", KINDS)
def test_announced_bytes(kind: str, tmp_path: Path) -> None:
    words = flags(options(kind, tmp_path))
    found = plan_of(*words)
    done = succeed("train", *words)
    run = tmp_path / "run"
    assert not (run / "checkpoint-1" / "trainer").exists()
    assert_announced(found, run / "checkpoint-2", run / "checkpoint-1")
    assert next(line for line in found["lines"] if line.startswith("disk")) in done.out


def test_weights_only(tmp_path: Path) -> None:
    words = flags(options("full, float32", tmp_path, save_only_model=True))
    found = plan_of(*words)["disk"]
    succeed("train", *words)
    assert found["checkpoint_bytes"] == found["model_bytes"]
    for step in (1, 2):
        size = size_of(tmp_path / "run" / f"checkpoint-{step}")
        assert found["model_bytes"] == pytest.approx(size, rel=TOLERANCE)


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (1, 0), (3, 2), (2, 3)])
def test_what_stays(limit: int, kept: int, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", rows(8))
    changes = {"save_steps": 1, "save_total_limit": limit, "keep_trainer_state": kept, "max_steps": 4}
    succeed("train", *flags(small(data, tmp_path / "run", **LORA, **changes)))
    run = tmp_path / "run"
    names = {p.name for p in run.glob("checkpoint-*")}
    assert names == {f"checkpoint-{n}" for n in range(5 - limit, 5)}
    whole = {p.parent.name for p in run.glob("checkpoint-*/trainer")}
    assert whole == {f"checkpoint-{n}" for n in range(5 - min(limit, kept), 5)}
    gone = {e["path"] for e in events(run, "deleted")}
    assert {f"checkpoint-{n}" for n in range(1, 5 - limit)} <= gone
