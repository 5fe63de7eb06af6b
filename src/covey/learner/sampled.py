"""Samples of gradients, taken while autograd makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def sampled_gradients(
    trained: Mapping[str, Tensor],
    sample: Callable[[Tensor], Tensor],
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Within it the samples of what autograd has for each parameter add up in float32, and autograd goes on
    with zeros that take no memory. `whole` are the shapes of parameters that are gathered only for a pass."""
    shapes = {
        n: torch.zeros((), device=p.device).expand(p.shape if whole is None else whole[n])
        for n, p in trained.items()
    }
    sums = {n: torch.zeros_like(sample(shape).contiguous()) for n, shape in shapes.items()}

    def adds_to(name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            sums[name] += sample(gradient)
            return gradient.new_zeros(()).expand_as(gradient)

        return hook

    hooks = [p.register_hook(adds_to(n)) for n, p in trained.items()]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
