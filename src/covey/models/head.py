"""The language-model head in chunks: log-probability and entropy of chosen tokens without a batch of logits.

Axes: N trained tokens, C tokens of a chunk, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Logits of one chunk: 16 Mi values are 64 MiB in float32.
_CHUNK_CELLS = 1 << 24


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How hidden states become logits: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None


def head_spec(model: nn.Module) -> HeadSpec:
    """Read the scale and soft cap that a model family applies after its output embedding from its config."""
    config: Any = model.config
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:
        scale *= float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        scale /= float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadSpec(scale=scale, softcap=None if softcap is None else float(softcap))


def logits_of(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> Tensor:
    """Float32 logits (N, V) before any temperature."""
    logits_NV = nn.functional.linear(hidden_ND, weight_VD, bias_V).float()
    if spec.scale != 1.0:
        logits_NV = logits_NV * spec.scale
    if spec.softcap is not None:
        logits_NV = spec.softcap * torch.tanh(logits_NV / spec.softcap)
    return logits_NV


class _ChunkedStats(torch.autograd.Function):
    """Log-probability and entropy per token; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        spec: HeadSpec,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_ND.shape[0]
        logprob_N = torch.empty(num_tokens, dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logprob_N)
        for rows in _chunks(num_tokens, weight_VD.shape[0]):
            logits_CV = logits_of(hidden_ND[rows], weight_VD, bias_V, spec)
            logits_CV /= temperature_N[rows, None]
            lse_C = logits_CV.logsumexp(dim=-1)
            logprob_N[rows] = logits_CV.gather(1, target_N[rows, None])[:, 0] - lse_C
            probs_CV = (logits_CV - lse_C[:, None]).exp_()
            entropy_N[rows] = lse_C - (probs_CV * logits_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        # Of a frozen head no gradient is made, which would be as large as the head in float32.
        grad_weight_VD = None
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for rows in _chunks(hidden_ND.shape[0], weight_VD.shape[0]):
            raw_CV = logits_of(hidden_ND[rows], weight_VD, bias_V, spec)
            logits_CV = raw_CV / temperature_N[rows, None]
            logprobs_CV = logits_CV - logits_CV.logsumexp(dim=-1, keepdim=True)
            probs_CV = logprobs_CV.exp()
            grad_CV = torch.zeros_like(raw_CV)
            if grad_logprob_N is not None:
                grad_CV.addcmul_(probs_CV, grad_logprob_N[rows, None], value=-1.0)
                grad_CV.scatter_add_(1, target_N[rows, None], grad_logprob_N[rows, None])
            if grad_entropy_N is not None:
                slope_CV = probs_CV * (logprobs_CV + entropy_N[rows, None])
                grad_CV.addcmul_(slope_CV, grad_entropy_N[rows, None], value=-1.0)
            grad_CV /= temperature_N[rows, None]
            if spec.softcap is not None:
                grad_CV *= 1.0 - (raw_CV / spec.softcap) ** 2
            if spec.scale != 1.0:
                grad_CV *= spec.scale
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            low_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[rows] = low_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += (low_CV.t() @ hidden_ND[rows]).float()
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None


def _chunks(num_tokens: int, vocab: int) -> list[slice]:
    size = max(1, _CHUNK_CELLS // vocab)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def token_stats(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature_N: Tensor,
    spec: HeadSpec,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `target_N` and entropy (nats), both float32 (N,), of softmax(logits /
    temperature)."""
    logprob_N, entropy_N = _ChunkedStats.apply(hidden_ND, weight_VD, bias_V, target_N, temperature_N, spec)
    return logprob_N, entropy_N
