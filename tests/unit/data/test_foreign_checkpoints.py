"""Checkpoints of other trainers: weights in shards, and directories that no run can be resumed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.data.foreign_checkpoints import foreign_kind
from covey.data.model_files import model_problem
from support.adapters import add_trainer_state, make_adapter
from support.checks import surveyed
from support.models import save_model

UNREADABLE = b"\x80\x04 not to be read"


def problems(tmp_path: Path, **options: Any) -> list[Any]:
    return [p for p in surveyed(tmp_path, **options) if p.severity == "error"]


def shards(directory: Path, kind: str) -> Path:
    """A checkpoint without whole weights, as Trainer leaves it under DeepSpeed or FSDP, or Megatron."""
    add_trainer_state(save_model("qwen2", directory))
    (directory / "model.safetensors").unlink()
    if kind == "deepspeed":
        (directory / "global_step40").mkdir()
        (directory / "global_step40" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(UNREADABLE)
        (directory / "zero_to_fp32.py").write_text("raise SystemExit")
    elif kind == "fsdp":
        (directory / "pytorch_model_fsdp_0").mkdir()
        (directory / "config.json").unlink()
    elif kind == "megatron":
        (directory / "latest_checkpointed_iteration.txt").write_text("40")
    else:
        (directory / "pytorch_model.bin").write_bytes(UNREADABLE)
    return directory


@pytest.mark.parametrize(
    ("kind", "code", "command"),
    [
        ("deepspeed", "E385", "zero_to_fp32.py {0} {0}-whole --safe_serialization"),
        ("fsdp", "E385", "accelerate merge-weights {0}/pytorch_model_fsdp_0 {0}-whole"),
        ("megatron", "E385", "swift export --mcore_model {0} --to_hf true --output_dir {0}-whole"),
        ("pickled", "E320", "M.from_pretrained('{0}').save_pretrained('{0}')"),
    ],
)
def test_weights_that_are_not_whole_are_refused_with_the_tool_that_makes_them(
    kind: str, code: str, command: str, tmp_path: Path
) -> None:
    path = shards(tmp_path / "checkpoint-40", kind)
    (found,) = [p for p in problems(tmp_path, model=str(path)) if p.option == "model"]
    assert found.code == code
    assert command.format(path) in found.fixes[0].text


def test_whole_weights_beside_shards_are_a_model(tmp_path: Path) -> None:
    path = add_trainer_state(save_model("qwen2", tmp_path / "checkpoint-40"))
    (path / "global_step40").mkdir()
    (path / "global_step40" / "mp_rank_00_model_states.pt").write_bytes(UNREADABLE)
    assert model_problem(path) is None
    (path / "model.safetensors").unlink()
    (path / "global_step40" / "mp_rank_00_model_states.pt").unlink()
    # The trainer's state is not taken for pickled weights.
    found = model_problem(path)
    assert found is not None
    assert found.kind == "no_weights"


@pytest.mark.parametrize("named", ["checkpoint", "directory", "latest"])
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_resume_from_another_trainers_checkpoint_says_what_to_type(
    kind: str, named: str, tmp_path: Path
) -> None:
    base = save_model("qwen2", tmp_path / "base")
    path = tmp_path / "run" / "checkpoint-40"
    add_trainer_state(make_adapter(base, path) if kind == "adapter" else save_model("qwen2", path))
    assert foreign_kind(path) == kind
    assert foreign_kind(base) == ""
    resume = {"checkpoint": str(path), "directory": str(path.parent), "latest": "latest"}[named]
    found = [
        p for p in problems(tmp_path, model=str(base), resume_from_checkpoint=resume) if p.code == "E418"
    ]
    assert len(found) == 1
    option = "--adapters" if kind == "adapter" else "--model"
    assert f"{option} {path}" in found[0].fixes[0].text
