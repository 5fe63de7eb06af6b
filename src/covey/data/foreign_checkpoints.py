"""Checkpoints of other trainers, told by the names of their files; none of these is opened.

transformers' Trainer, which TRL and ms-swift train with, writes weights, tokenizer and a state that is
pickled; DeepSpeed, FSDP and Megatron may write the weights as shards of their own instead.
"""

from __future__ import annotations

from os.path import isdir, isfile
from pathlib import Path
from typing import Literal

from covey.config.adapters import is_adapter
from covey.texts import tr

_STATE = (
    *("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth"),
    *("rng_state_0.pth", "training_args.bin", "zero_to_fp32.py"),
)
_FSDP, _MEGATRON = "pytorch_model_fsdp_0", "latest_checkpointed_iteration.txt"

STATE_PATTERNS = (
    *("optimizer*.pt", "optimizer*.bin", "scheduler.pt", "rng_state*.pth", "training_args.bin"),
    *("scaler.pt", "scaler*.pt"),
)
"""Pickles of a trainer's state, which are no weights."""


def foreign_kind(directory: Path) -> Literal["", "model", "adapter"]:
    """What a checkpoint of another trainer holds; "" where a directory is none."""
    is_one = any(isfile(directory / name) for name in _STATE)
    is_one = is_one or next(directory.glob("global_step*/"), None) is not None
    if not is_one:
        return ""
    return "adapter" if is_adapter(str(directory)) else "model"


def shards_of(directory: Path) -> tuple[str, str] | None:
    """What stands in the place of whole weights, and the command that makes weights of it; None where nothing
    does."""
    out = f"{directory}-whole"
    if next(directory.glob("global_step*/*_states.pt"), None) is not None:
        script = directory / "zero_to_fp32.py"
        tool = str(script) if isfile(script) else "-m deepspeed.utils.zero_to_fp32"
        return tr("shards of DeepSpeed"), f"python {tool} {directory} {out} --safe_serialization"
    if isdir(directory / _FSDP):
        return tr("shards of FSDP"), f"accelerate merge-weights {directory / _FSDP} {out}"
    if isfile(directory / _MEGATRON):
        return tr(
            "shards of Megatron"
        ), f"swift export --mcore_model {directory} --to_hf true --output_dir {out}"
    return None
