"""Loading a policy from a model directory: safetensors only, no remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from covey.models.policy import Policy
from covey.models.probe import ProbeResult, widest_stream


def load_policy(
    directory: Path, *, device: torch.device, disable_dropout: bool, gradient_checkpointing: bool
) -> Policy:
    """The model of a directory in float32, on padded rows; `choose_stream` says what else it can do.

    A backend that computes in a lower dtype casts the weights once it has their float32 masters.
    """
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    model.to(device)
    if disable_dropout:
        _silence_dropout(model)
    if gradient_checkpointing:
        # transformers 5.23 renames the method; the older name is what 5.17 has.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    policy = Policy(model, stream="padded")
    policy.train()
    return policy


def choose_stream(policy: Policy) -> list[ProbeResult]:
    """Put the policy on the best layout that it passes the probe with; returns what the probe measured."""
    stream, results = widest_stream(policy)
    policy.use_stream(stream)
    return results


def _silence_dropout(model: nn.Module) -> None:
    """Every dropout to 0: modules, and the rates that attention layers hold as plain numbers.

    Set on the modules and not in the config, which a checkpoint keeps as the model's author wrote it.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


# Everything beside the weights that a model directory needs to be loaded with its tokenizer.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def save_policy(policy: Policy, source: Path, target: Path) -> None:
    """Save the model so that `from_pretrained` loads it, with the tokenizer files of `source` beside it.

    Weights are saved in the dtype that they are held in for computing.
    """
    policy.model.save_pretrained(target)  # type: ignore[operator]
    for name in _TEXT_FILES:
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
