"""A prompt computed once for several forward passes over its completions.

What the passes take from the prompt's own are the keys and values of every layer, and what its last position
says of the first token of every completion. The prompt's graph is kept. All passes but the last give their
gradients to be held, and the last one's backward pass goes on through the prompt's with the sum: one backward
pass of the prompt, and one pass's activations beside the prompt's at a time.

Axes: P tokens of the prompt, T those of a pass behind it; N trained tokens of a pass, F of all passes those
that the prompt's last position predicts, X of a pass all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.kernels.kept import joined, select
from covey.types import MicroBatch, SharedPrompt


def share_prompt(passes: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches that begin with the same prompt, to be forwarded in this order; a single one as it is."""
    if len(passes) == 1:
        return list(passes)
    last, device = passes[0].segments[0].length - 1, passes[0].tokens_T.device
    counts = [micro.context_N.shape[0] for micro in passes]
    first_N = _on_host(torch.cat([micro.context_U[micro.context_N] for micro in passes])) == last
    first = torch.from_numpy(np.flatnonzero(first_N)).to(device)
    target_F, temperature_F = (
        torch.cat(parts)[first]
        for parts in zip(*((micro.target_N, micro.temperature_N) for micro in passes), strict=True)
    )
    sets = [micro.kept for micro in passes if micro.kept is not None]
    kept_F = select(joined(sets), first) if sets else None
    # The first tokens of all passes in their order, and behind them a pass's own.
    own_N = ~first_N
    begin = np.cumsum([0, *counts])
    own_before = np.concatenate([[0], np.cumsum(own_N)])
    own_counts = np.diff(own_before[begin]).tolist()
    own_number_N = own_before[:-1] - np.repeat(own_before[begin[:-1]], counts)
    index_N = np.where(first_N, np.cumsum(first_N) - 1, first_N.sum() + own_number_N)
    own_X = np.flatnonzero(own_N) - np.repeat(begin[:-1], own_counts)
    parts = zip(
        torch.from_numpy(own_X).to(device).split(own_counts),
        torch.from_numpy(index_N).to(device).split(counts),
        strict=True,
    )
    return [
        replace(
            micro,
            shared=SharedPrompt(
                target_F=target_F,
                temperature_F=temperature_F,
                own_X=own_part_X,
                index_N=index_part_N,
                follows=number > 0,
                is_followed=number < len(passes) - 1,
                kept_F=kept_F,
            ),
        )
        for number, (micro, (own_part_X, index_part_N)) in enumerate(zip(passes, parts, strict=True))
    ]


def _on_host(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


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

    def extend(self, names: Sequence[Hashable], own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What was kept (P, ...) with a pass's own (T, ...) behind it, each. If the backward pass reaches one
        of them, it settles all."""
        return _Extend.apply(self, names, *map(self.take, names), *own)  # type: ignore[no-any-return]

    def pair(self, layer: int, key_TKD: Tensor, value_TKD: Tensor, *, extends: bool) -> tuple[Tensor, ...]:
        """Keys and values that a layer's queries see: those of the prompt's pass are kept, those of another
        one `extends` them."""
        names = ("keys", layer), ("values", layer)
        if extends:
            return self.extend(names, (key_TKD, value_TKD))
        self.keep(names[0], key_TKD[: self.length])
        self.keep(names[1], value_TKD[: self.length])
        return key_TKD, value_TKD


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefix: Prefix, names: Sequence[Hashable], *parts: Tensor) -> tuple[Tensor, ...]:
        kept, own = parts[: len(names)], parts[len(names) :]
        ctx.prefix, ctx.names, ctx.lengths = prefix, names, [part.shape[0] for part in kept]
        ctx.set_materialize_grads(False)
        return tuple(torch.cat(pair) for pair in zip(kept, own, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        prefix: Prefix = ctx.prefix
        own: list[Tensor | None] = []
        for name, length, grad in zip(ctx.names, ctx.lengths, grads, strict=True):
            if grad is None:
                own.append(None)
                continue
            own.append(grad[length:])
            held = prefix.held(name)
            if held is not None:
                held += grad[:length]
        needed = ctx.needs_input_grad[2:]
        totals = [
            prefix.settle(name, is_last=is_last) for name, is_last in zip(ctx.names, needed, strict=False)
        ]
        return None, None, *totals, *own
