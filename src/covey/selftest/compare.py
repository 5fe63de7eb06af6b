"""Two ways to compute the same: covey's forward pass and plain logits, and how far two results are apart.

Axes: N trained tokens, in row order, then token order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from covey.models.policy import Policy
from covey.models.prefix import share_prompt
from covey.models.probe import micro_of
from covey.token_streams import Row

Result = tuple[Tensor, Tensor]
"""Logprobs (N,), and the gradient by all weights as one vector."""


def by_policy(policy: Policy, rows: Sequence[Row], *, in_passes: bool = False) -> Result:
    """Logprobs, and the gradient of a mixed loss of logprobs and entropies at mixed temperatures; all rows in
    one pass, or each in its own, of which those of a prompt go on from the first one's."""
    policy.train().zero_grad(set_to_none=True)
    weight_N, heat_N = _weights(rows, policy.device)
    passes = [[row] for row in rows] if in_passes else [rows]
    micros = [micro_of(members, policy.stream, policy.device) for members in passes]
    counts = [len(micro.target_N) for micro in micros]
    micros = [
        replace(m, temperature_N=heat_n) for m, heat_n in zip(micros, heat_N.split(counts), strict=True)
    ]
    keyed = groupby(zip(passes, micros, strict=True), key=lambda pair: pair[0][0].prompt_key)
    shared = [micro for _, same in keyed for micro in share_prompt([micro for _, micro in same])]
    logprobs: list[Tensor] = []
    for micro, weight_n in zip(shared, weight_N.split(counts), strict=True):
        stats = policy(micro)
        ((stats.logprob_N + 0.1 * stats.entropy_N) * weight_n).sum().backward()
        logprobs.append(stats.logprob_N.detach())
    return torch.cat(logprobs), _taken_gradient(policy.model)


def by_plain_logits(model: Any, rows: Sequence[Row]) -> Result:
    """The same without covey: the model's own logits of every row, row by row."""
    model.train().zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    weight_N, heat_N = _weights(rows, device)
    logprobs, start = [], 0
    for row in rows:
        ids = torch.tensor([list(row.token_ids)], device=device)
        end = start + len(row.token_ids) - row.prompt_length
        logits = model(input_ids=ids, use_cache=False).logits[0, row.prompt_length - 1 : -1].float()
        table = (logits / heat_N[start:end, None]).log_softmax(-1)
        logprob = table.gather(1, ids[0, row.prompt_length :, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        ((logprob + 0.1 * entropy) * weight_N[start:end]).sum().backward()
        logprobs.append(logprob.detach())
        start = end
    return torch.cat(logprobs), _taken_gradient(model)


def relative(got: Tensor, expected: Tensor) -> float:
    """‖got - expected‖ / ‖expected‖."""
    return far({"": got}, {"": expected})


def far(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """‖got - expected‖ / ‖expected‖ over tensors of the same names.

    Not a number where `expected` is 0: what is lost in both ways agrees with itself.
    """
    total = math.sqrt(sum(_square(part) for tensor in expected.values() for part in _parts(tensor)))
    gap = math.sqrt(
        sum(
            _square(a - b)
            for name, tensor in expected.items()
            for a, b in zip(_parts(got[name]), _parts(tensor), strict=True)
        )
    )
    return gap / total if total != 0.0 else math.nan


# Elements of which a difference and a copy in float64 are held at once.
_PART = 1 << 22


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(_PART)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _weights(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """The weight and the temperature of every trained token; siblings have one temperature at a place."""
    place_N = torch.cat([torch.arange(sum(row.is_trained)) for row in rows]).to(device)
    weight_N = torch.randn(len(place_N), generator=torch.Generator().manual_seed(3)).to(device)
    return weight_N, 1.0 + 0.2 * weight_N[place_N].clamp(-1, 1)


def _taken_gradient(model: Any) -> Tensor:
    """The gradient, which the model keeps no longer."""
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return gradient
