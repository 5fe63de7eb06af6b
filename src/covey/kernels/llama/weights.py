"""The weights of a model of the Llama family, for forward passes of few kernel calls.

The calls of transformers' modules cost more than the arithmetic of a small batch. A model that is recognised
here can do without them: its every module is transformers' own, and its layers are RMSNorm, rotary attention
and a gated layer with SiLU. Every other model, and every module that somebody has hooked, takes the general
path, to which tests hold these.

Axes: n tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.products import FastLinear, linear

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Rotations that follow from a token's position alone, and not from the longest one beside it.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a weight: `scaling` x up @ down. Source: LoRA (arXiv:2106.09685)."""

    down: Tensor
    up: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer's weight and bias, and what an adapter that is not merged adds to the weight."""

    weight: Tensor
    bias: Tensor | None
    added: LowRank | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias; what an adapter adds is computed in its own dtype, as peft does."""
        out = linear(x, self.weight, self.bias)
        if self.added is None:
            return out
        low = linear(x.to(self.added.down.dtype), self.added.down, None)
        return (out + linear(low, self.added.up, None) * self.added.scaling).to(out.dtype)


def joined(layers: tuple[Linear, ...]) -> Linear:
    """A copy of several layers as one that gives their outputs side by side."""
    weight = torch.cat([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return Linear(weight, None)
    biases = [layer.bias if layer.bias is not None else layer.weight.new_zeros(()) for layer in layers]
    spread = [b.expand(layer.weight.shape[0]) for b, layer in zip(biases, layers, strict=True)]
    return Linear(weight, torch.cat(spread))


def join_into(target: Linear, layers: tuple[Linear, ...]) -> None:
    """Write several layers into what `joined` has made of them."""
    made = joined(layers)
    target.weight.copy_(made.weight)
    if target.bias is not None and made.bias is not None:
        target.bias.copy_(made.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """A decoder layer: queries, keys and values; gate and up; the norms before attention and gated layer.

    `query_norm` and `key_norm` are Qwen 3's.
    """

    heads: tuple[Linear, Linear, Linear]
    out: Linear
    gated: tuple[Linear, Linear]
    down: Linear
    before_attention: Tensor
    before_mlp: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None

    @property
    def products(self) -> tuple[Linear, ...]:
        """Its linear layers, in the order of the library."""
        return *self.heads, self.out, *self.gated, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """A model's weights as they are now."""

    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    norm: Tensor
    epsilon: float
    head_width: int
    scaling: float
    rotary: Any

    @property
    def size(self) -> int:
        """The number of weights of the layers' products."""
        return sum(part.weight.numel() for layer in self.layers for part in layer.products)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter adds to some weight."""
        return any(part.added is not None for layer in self.layers for part in layer.products)

    def rotations(self, x_nE: Tensor, positions_n: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (n, 1, D), like `x_nE`, with which a rotation is x * cos + roll(x) * sin.

        The first half of the sines has its sign turned.
        """
        cos, sin = self.rotary(x_nE, positions_n[None])
        half = self.head_width // 2
        return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1)


def llama(model: nn.Module, *, adapted: bool = False) -> Llama | None:
    """The weights of a model whose every module is one that this file knows; None for any other.

    An adapter has to be merged, unless an `adapted` model is asked for. Its dropout has to be off.
    """
    known: Any = model
    config, backbone = known.config, known.base_model
    if config.model_type not in _FAMILIES or config.hidden_act != "silu" or _windowed(config):
        return None
    if not type(backbone).__module__.startswith("transformers.models."):
        return None
    if backbone.rotary_emb.rope_type not in _FIXED_ROTATIONS:
        return None
    layers = tuple(_layer(module) for module in backbone.layers)
    if any(layer is None for layer in layers) or _hooked(backbone):
        return None
    attention = backbone.layers[0].self_attn
    found = Llama(
        embedding=backbone.embed_tokens.weight,
        layers=tuple(layer for layer in layers if layer is not None),
        norm=backbone.norm.weight,
        epsilon=config.rms_norm_eps,
        head_width=attention.head_dim,
        scaling=attention.scaling,
        rotary=backbone.rotary_emb,
    )
    return found if adapted or not found.is_adapted else None


def weights_of(known: Llama) -> list[Tensor]:
    """Every weight that a forward pass reads."""
    weights = [known.embedding, known.norm]
    for layer in known.layers:
        weights += [part.weight for part in layer.products]
        weights += [part.bias for part in layer.products if part.bias is not None]
        added = [part.added for part in layer.products if part.added is not None]
        weights += [matrix for one in added for matrix in (one.down, one.up)]
        norms = (layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm)
        weights += [norm for norm in norms if norm is not None]
    return weights


def _windowed(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _hooked(backbone: nn.Module) -> bool:
    """Whether somebody wants to hear of the calls that would not be made."""
    return any(hooks for module in backbone.modules() for hooks in _hooks_of(module))


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks


def _layer(module: Any) -> LlamaLayer | None:
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
    return LlamaLayer(
        heads=(query, key, value),
        out=out,
        gated=(gate, up),
        down=down,
        before_attention=module.input_layernorm.weight,
        before_mlp=module.post_attention_layernorm.weight,
        query_norm=None if norms[0] is None else norms[0].weight,
        key_norm=None if norms[1] is None else norms[1].weight,
    )


def _linear(module: Any) -> Linear | None:
    """A plain linear layer, or one of peft's whose adapter is merged or plain LoRA."""
    added = None
    if hasattr(module, "get_base_layer"):
        if not module.merged:
            added = _low_rank(module)
            # One that is off is computed as it is when it is on, so that a new adapter changes no bit.
            if added is None:
                return None
        if module.disable_adapters:
            added = None
        module = module.get_base_layer()
    if type(module) not in (nn.Linear, FastLinear):
        return None
    return Linear(module.weight, module.bias, added)


def _low_rank(layer: Any) -> LowRank | None:
    """What a LoRA layer of peft adds to its weight; None where it adds anything else."""
    names = list(layer.active_adapters)
    if len(names) != 1 or names[0] in layer.lora_variant or layer.fan_in_fan_out:
        return None
    (name,) = names
    down, up = layer.lora_A[name], layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0.0
    is_plain = down.bias is None and up.bias is None and not drops
    return LowRank(down.weight, up.weight, layer.scaling[name]) if is_plain else None
