"""A sampler's forward pass through a model of the Llama family in few kernel calls.

RMSNorm is one call, queries and keys are rotated together, nothing is wrapped. Of a small model the weights
of a layer's queries, keys and values, and of its gate and up, are copied side by side at the start of a
rollout. An adapter that is not merged is computed beside the weights.

Axes: n rows, or tokens of prompts, H query heads, K key heads, X all heads, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from covey.kernels.llama.weights import Linear, Llama, LlamaLayer, join_into, joined, llama, weights_of
from covey.kernels.protocol import Cache, CacheLayout, Decoder, SampledModel

# Bytes that the copies may take: a model beyond it is slowed by its weights more than by the calls saved.
_MOST_COPIED = 1 << 29


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights, and the copies that serve one rollout; None where the weights serve themselves."""

    weights: LlamaLayer
    heads: Linear | None = None
    gated: Linear | None = None

    def project(self, x_nE: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        if self.heads is not None:
            return self.heads(x_nE)
        return torch.cat([part(x_nE) for part in self.weights.heads], dim=1)

    def gate_and_up(self, x_nE: Tensor) -> tuple[Tensor, Tensor]:
        """What SiLU is taken of, and what that is multiplied with."""
        if self.gated is not None:
            gate, up = self.gated(x_nE).chunk(2, dim=1)
            return gate, up
        gate, up = (part(x_nE) for part in self.weights.gated)
        return gate, up


@dataclass(frozen=True, slots=True)
class LlamaDecoder:
    """As `Decoder` says: a model as its weights were when this was made, and the cosines and sines of every
    position, (P, 1, D)."""

    model: SampledModel
    weights: Llama
    layers: tuple[_Layer, ...]
    cos_P1D: Tensor
    sin_P1D: Tensor
    is_compiled = False
    sampler = None

    def logits(self, hidden_nE: Tensor) -> Tensor:
        """As the protocol says."""
        return self.model.logits(hidden_nE)

    def copy_rows(self, cache: Cache, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """As the protocol says."""
        cache.copy_rows(sources, targets, columns)

    def hidden(self, tokens_n: Tensor, positions_n: Tensor, layout: CacheLayout) -> Tensor:
        """As the protocol says."""
        known = self.weights
        x_nE = F.embedding(tokens_n, known.embedding)
        cos_n1D, sin_n1D = self.cos_P1D[positions_n], self.sin_P1D[positions_n]
        for number, layer in enumerate(self.layers):
            heads_nX = layer.project(self._norm(x_nE, layer.weights.before_attention))
            heads_nXD = heads_nX.view(heads_nX.shape[0], -1, known.head_width)
            queries, keys = self._counts(layer.weights)
            turned_nXD = heads_nXD[:, : queries + keys]
            if layer.weights.query_norm is not None and layer.weights.key_norm is not None:
                turned_nXD[:, :queries] = self._norm(turned_nXD[:, :queries], layer.weights.query_norm)
                turned_nXD[:, queries:] = self._norm(turned_nXD[:, queries:], layer.weights.key_norm)
            rolled_nXD = turned_nXD.roll(known.head_width // 2, -1).mul_(sin_n1D)
            turned_nXD.mul_(cos_n1D).add_(rolled_nXD)
            attended_nHD = layout.attend_heads(number, heads_nXD, queries, known.scaling)
            x_nE += layer.weights.out(attended_nHD.flatten(1))
            gate_nF, up_nF = layer.gate_and_up(self._norm(x_nE, layer.weights.before_mlp))
            x_nE += layer.weights.down(F.silu(gate_nF).mul_(up_nF))
        return self._norm(x_nE, known.norm)

    def serves(self, known: Llama, num_positions: int) -> bool:
        """Whether this is of the very same parameters, in this precision, and for so many positions."""
        ours, theirs = weights_of(self.weights), weights_of(known)
        return (
            num_positions <= len(self.cos_P1D)
            and len(ours) == len(theirs)
            and all(one is other for one, other in zip(ours, theirs, strict=True))
            and self.cos_P1D.dtype == known.embedding.dtype
            and self.cos_P1D.device == known.embedding.device
        )

    def refresh(self) -> None:
        """Copy the weights as they are now, where they are copied."""
        for layer in self.layers:
            if layer.heads is not None and layer.gated is not None:
                join_into(layer.heads, layer.weights.heads)
                join_into(layer.gated, layer.weights.gated)

    def _counts(self, layer: LlamaLayer) -> tuple[int, int]:
        query, key, _ = (part.weight.shape[0] // self.weights.head_width for part in layer.heads)
        return query, key

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.weights.epsilon)
        # transformers rounds the normed value to the lower precision before it multiplies.
        return weight * F.rms_norm(x, weight.shape, None, self.weights.epsilon)


@torch.inference_mode()
def llama_decoder(
    policy: SampledModel, num_positions: int, former: Decoder | None = None
) -> LlamaDecoder | None:
    """The decoder of a policy whose model `llama` recognises, for positions up to `num_positions`; None
    for any other. A `former` one of the same weights is brought up to date and returned."""
    known = llama(policy.model, adapted=True)
    if known is None:
        return None
    if isinstance(former, LlamaDecoder) and former.serves(known, num_positions):
        former.refresh()
        return former
    copied = [part.weight for layer in known.layers for part in (*layer.heads, *layer.gated)]
    is_small = not known.is_adapted and sum(weight.nbytes for weight in copied) <= _MOST_COPIED
    return LlamaDecoder(
        policy,
        known,
        tuple(
            _Layer(layer, joined(layer.heads), joined(layer.gated)) if is_small else _Layer(layer)
            for layer in known.layers
        ),
        *known.rotations(known.embedding, torch.arange(num_positions, device=known.embedding.device)),
    )
