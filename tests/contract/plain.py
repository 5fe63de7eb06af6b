"""The gradient of a first step without covey: transformers' model in float64, one row at a time."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.telemetry.kept_files import add_sets


def gradient(model: Path, replay: Path, loss_type: str) -> dict[str, Tensor]:
    """The derivative of the loss of the first rollout, by the names that a backend gives.

    Before an update every ratio is 1, so it is the policy gradient: -A times the derivative of the logprobs,
    divided by the tokens of all rows in the loss (`dapo`), or by the length of each row and the number of all
    rows (`grpo`). That of the KL term is 0 there.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    path = replay / "rollout-000000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    add_sets(path, lines)
    rows = [row for row in _with_advantages(lines) if row["status"] == "ok" and row["finish"] == "stop"]
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        own = len(row["completion_ids"])
        divisor = {"dapo": num_tokens, "grpo": own * len(lines)}[loss_type]
        total = total - row["advantage"] * _logprobs(policy, row).sum() / divisor
    total.backward()
    return {
        f"model.{name}": torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in policy.named_parameters()
    }


def _with_advantages(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for _, members in groupby(lines, key=lambda line: line["group"]):
        group = list(members)
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        mean, spread = fmean(rewards), stdev(rewards) + 1e-4
        out += [
            {**row, "advantage": 0.0 if row["reward"] is None else (row["reward"] - mean) / spread}
            for row in group
        ]
    return out


def _logprobs(policy: Any, row: dict[str, Any]) -> Tensor:
    """Logprobs of a row's completion at the temperature it was sampled at, within the sets that it was drawn
    from."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    logits = policy(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / row["temperature"]
    targets = torch.tensor(row["completion_ids"])
    if "kept" in row:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for place, ids in enumerate(row["kept"]):
            outside[place, ids.tolist()] = False
        logits = logits.masked_fill(outside, -torch.inf)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
