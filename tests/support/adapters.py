"""Adapters made by peft itself, and directories as TRL's and ms-swift's trainers leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def make_adapter(base: Path, target: Path, *, seed: int = 3, **changes: Any) -> Path:
    """Save an adapter whose update is not 0, as `PeftModel.save_pretrained` writes it."""
    asked = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **changes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **asked))
    for name, parameter in adapted.named_parameters():
        if ".lora_A" in name or ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif parameter.requires_grad:
            parameter.data.add_(0.01 * torch.randn_like(parameter))
    adapted.save_pretrained(str(target))
    return target


def edit_adapter(directory: Path, **changes: Any) -> Path:
    """Change adapter_config.json."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def add_trainer_state(directory: Path, *, is_swift: bool = False) -> Path:
    """Put the files beside the weights that a checkpoint of transformers' Trainer has. What is a pickle there
    is no file that could be read here: whoever tries fails."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (directory / name).write_bytes(b"\x80\x04 not to be read")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": []}))
    if is_swift:
        (directory / "args.json").write_text(json.dumps({"tuner_type": "lora", "lora_rank": 8}))
        (directory / "additional_config.json").write_text(json.dumps({"lora_dtype": None}))
    return directory


def peft_logits(base: Path, adapter: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """The logits of an adapter on its base, by peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        return [adapted(input_ids=torch.tensor([row])).logits[0] for row in rows]
