"""A sampler's forward pass through a model of the Llama family in few kernel calls.

For a small batch the calls of transformers' modules cost more than their arithmetic. Here the same weights go
through the same formulas without them: RMSNorm in one call, queries and keys rotated together, nothing
wrapped. It serves what it recognises and nothing else; every other model and training take the general path,
to which a test holds this one.

Axes: n rows, or tokens of prompts, H query heads, K key heads, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.models.linear import FastLinear, linear
from covey.models.policy import Policy

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class RowLayout(Protocol):
    """Attention of new tokens, as (n, heads, D) tensors."""

    def attend_rows(
        self, layer: int, query_nHD: Tensor, key_nKD: Tensor, value_nKD: Tensor, scaling: float
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A decoder layer's weights; `query_norm` and `key_norm` are Qwen 3's."""

    query: _Linear
    key: _Linear
    value: _Linear
    out: _Linear
    gate: _Linear
    up: _Linear
    down: _Linear
    before_attention: Tensor
    before_mlp: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaStep:
    """Weights of a policy as they are now; made anew when others take their place."""

    embedding: Tensor
    layers: tuple[_Layer, ...]
    norm: Tensor
    epsilon: float
    head_width: int
    scaling: float
    rotary: Any

    def hidden(self, tokens_n: Tensor, positions_n: Tensor, layout: RowLayout) -> Tensor:
        """Last hidden states (n, E) of the new tokens."""
        x_nE = F.embedding(tokens_n, self.embedding)
        cos_n1D, sin_n1D = self._turns(x_nE, positions_n)
        for number, layer in enumerate(self.layers):
            normed_nE = self._norm(x_nE, layer.before_attention)
            query_nHD = self._heads(layer.query(normed_nE), layer.query_norm)
            key_nKD = self._heads(layer.key(normed_nE), layer.key_norm)
            value_nKD = layer.value(normed_nE).unflatten(1, (-1, self.head_width))
            both_nXD = torch.cat([query_nHD, key_nKD], dim=1)
            turned_nXD = both_nXD.roll(self.head_width // 2, -1).mul_(sin_n1D)
            both_nXD.mul_(cos_n1D).add_(turned_nXD)
            query_nHD, key_nKD = both_nXD.split([query_nHD.shape[1], key_nKD.shape[1]], dim=1)
            attended_nHD = layout.attend_rows(number, query_nHD, key_nKD, value_nKD, self.scaling)
            x_nE += layer.out(attended_nHD.flatten(1))
            normed_nE = self._norm(x_nE, layer.before_mlp)
            x_nE += layer.down(F.silu(layer.gate(normed_nE), inplace=True).mul_(layer.up(normed_nE)))
        return self._norm(x_nE, self.norm)

    def _turns(self, x_nE: Tensor, positions_n: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (n, 1, D) with which a rotation is x * cos + roll(x) * sin.

        The first half of the sines has its sign turned.
        """
        cos, sin = self.rotary(x_nE, positions_n[None])
        half = self.head_width // 2
        return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        # transformers rounds the normed value to the lower precision before it multiplies.
        return weight * F.rms_norm(x, weight.shape, None, self.epsilon)

    def _heads(self, x_nX: Tensor, norm: Tensor | None) -> Tensor:
        x_nHD = x_nX.unflatten(1, (-1, self.head_width))
        return x_nHD if norm is None else self._norm(x_nHD, norm)


def llama_step(policy: Policy) -> LlamaStep | None:
    """The step of a policy whose every module is one that this file knows; None for any other.

    An adapter has to be merged.
    """
    model: Any = policy.model
    config = model.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu" or _windowed(config):
        return None
    backbone = model.base_model
    if not type(backbone).__module__.startswith("transformers.models."):
        return None
    layers = tuple(_layer(module) for module in backbone.layers)
    if any(layer is None for layer in layers):
        return None
    attention = backbone.layers[0].self_attn
    return LlamaStep(
        embedding=backbone.embed_tokens.weight,
        layers=tuple(layer for layer in layers if layer is not None),
        norm=backbone.norm.weight,
        epsilon=config.rms_norm_eps,
        head_width=attention.head_dim,
        scaling=attention.scaling,
        rotary=backbone.rotary_emb,
    )


def _windowed(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _layer(module: Any) -> _Layer | None:
    attention, mlp = module.self_attn, module.mlp
    found = [
        _linear(part)
        for part in (
            *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        )
    ]
    linear = [part for part in found if part is not None]
    if len(linear) < len(found):
        return None
    query, key, value, out, gate, up, down = linear
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        query=query,
        key=key,
        value=value,
        out=out,
        gate=gate,
        up=up,
        down=down,
        before_attention=module.input_layernorm.weight,
        before_mlp=module.post_attention_layernorm.weight,
        query_norm=None if norms[0] is None else norms[0].weight,
        key_norm=None if norms[1] is None else norms[1].weight,
    )


def _linear(module: Any) -> _Linear | None:
    """A plain linear layer, or the base of one whose adapter is merged into it."""
    if hasattr(module, "get_base_layer"):
        if not module.merged:
            return None
        module = module.get_base_layer()
    if type(module) not in (nn.Linear, FastLinear) or module._forward_hooks or module._forward_pre_hooks:
        return None
    return _Linear(module.weight, module.bias)
