"""A prompt computed once for several forward passes over its completions.

What the passes take from the prompt's own are the keys and values of every layer and its last hidden state.
The prompt's graph is kept. All passes but the last give their gradients to be held, and the last one's
backward pass goes on through the prompt's with the sum: one backward pass of the prompt, and one pass's
activations beside the prompt's at a time.

Axes: P tokens of the prompt, T those of a pass behind it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Prefix:
    """What passes over completions take from the pass over their prompt of `length` tokens, by name.

    `is_last` says of the pass at hand that no other follows.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.is_last = False
        self._kept: dict[Hashable, Tensor] = {}
        self._held: dict[Hashable, Tensor] = {}

    @property
    def first(self) -> int:
        """The first token of a stream that a pass computes: its own first one, once the prompt is kept."""
        return self.length if self._kept else 0

    def keep(self, name: Hashable, part: Tensor) -> None:
        """Keep what the prompt's pass computed; a second time, when it is recomputed, nothing is done."""
        self._kept.setdefault(name, part)

    def take(self, name: Hashable) -> Tensor:
        """What was kept, within the prompt's graph for the last pass alone."""
        part = self._kept[name]
        return part if self.is_last else part.detach()

    def held(self, name: Hashable) -> Tensor | None:
        """The sum of gradients so far, float32, to be added to; None where the prompt's pass has none."""
        part = self._kept[name]
        if name not in self._held and part.requires_grad:
            self._held[name] = torch.zeros(part.shape, dtype=torch.float32, device=part.device)
        return self._held.get(name)

    def settle(self, name: Hashable, *, is_last: bool) -> Tensor | None:
        """What a backward pass hands to the prompt's once it has added its own: nothing, and the last one the
        sum. Nothing is kept then: the prompt's graph knows of this object, and each would hold the other."""
        if not is_last:
            return None
        part = self._kept[name]
        self._kept[name] = part.new_empty(0)
        total = self._held.pop(name, None)
        return None if total is None else total.to(part.dtype)

    def extend(self, name: Hashable, own: Tensor) -> Tensor:
        """What was kept (P, ...) with a pass's own (T, ...) behind it."""
        return _Extend.apply(own, self.take(name), self, name)  # type: ignore[no-any-return]

    def pair(self, layer: int, key_TKD: Tensor, value_TKD: Tensor, *, extends: bool) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer's queries see: those of the prompt's pass are kept, those of another
        one `extends` them."""
        names = ("keys", layer), ("values", layer)
        if extends:
            return self.extend(names[0], key_TKD), self.extend(names[1], value_TKD)
        self.keep(names[0], key_TKD[: self.length])
        self.keep(names[1], value_TKD[: self.length])
        return key_TKD, value_TKD


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, kept: Tensor, prefix: Prefix, name: Hashable) -> Tensor:
        ctx.prefix, ctx.name, ctx.length = prefix, name, kept.shape[0]
        return torch.cat([kept, own])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        held = ctx.prefix.held(ctx.name)
        if held is not None:
            held += grad[: ctx.length]
        total = ctx.prefix.settle(ctx.name, is_last=ctx.needs_input_grad[1])
        return grad[ctx.length :], total, None, None
