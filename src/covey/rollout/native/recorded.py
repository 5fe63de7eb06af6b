"""Strides of decoding steps that are recorded on a GPU once for each size and played again.

A decoding step is hundreds of small kernels, and a GPU waits for the host that launches them one by one. A
recording (a CUDA graph) is launched whole. It reads and writes the memory that it was made with, so the
inputs of a stride are copied into tensors that stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Makes a recording of what a function computes, without computing it; the recording is played by a call.
Record = Callable[[Callable[[], None]], Callable[[], None]]
# Computes a stride on tensors at their places: tokens and logprobs, (n, k) each.
Compute = Callable[[], tuple[Tensor, Tensor]]

# Logprobs of a recording and of the plain steps, which may take other kernels.
_TOLERANCE = 1e-2


def cuda_graph(compute: Callable[[], None]) -> Callable[[], None]:
    """Record as a CUDA graph; the plain run before it has chosen kernels and made workspaces."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


@dataclass(slots=True)
class _Recording:
    inputs: tuple[Tensor, ...]
    play: Callable[[], None]
    tokens_nk: Tensor
    logprobs_nk: Tensor


class Recordings:
    """Recordings by size; `failure` says why there are no more, and then every stride is computed plainly.

    The first stride of each size is computed both ways and compared.
    """

    def __init__(self, record: Record = cuda_graph) -> None:
        self._record = record
        self._held: dict[tuple[int, ...], _Recording] = {}
        self.failure = ""

    def forget(self) -> None:
        """Drop every recording: something that they read lies elsewhere now."""
        self._held.clear()

    def play(
        self, size: tuple[int, ...], inputs: tuple[Tensor, ...], compute: Callable[..., Compute]
    ) -> tuple[Tensor, Tensor]:
        """Tokens and logprobs of a stride; `compute(*tensors)` says how they follow from inputs of this
        size."""
        held = self._held.get(size)
        if held is None:
            return compute(*inputs)() if self.failure else self._made(size, inputs, compute)
        for tensor, value in zip(held.inputs, inputs, strict=True):
            tensor.copy_(value)
        held.play()
        return held.tokens_nk, held.logprobs_nk

    def _made(
        self, size: tuple[int, ...], inputs: tuple[Tensor, ...], compute: Callable[..., Compute]
    ) -> tuple[Tensor, Tensor]:
        """Compute a stride plainly, record it and play it: a second time it writes what it wrote before."""
        fixed = tuple(tensor.clone() for tensor in inputs)
        steps = compute(*fixed)
        tokens_nk, logprobs_nk = steps()
        out = torch.zeros_like(tokens_nk), torch.zeros_like(logprobs_nk)

        def all_of_it() -> None:
            for place, value in zip(out, steps(), strict=True):
                place.copy_(value)

        try:
            play = self._record(all_of_it)
            play()
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0])
            return tokens_nk, logprobs_nk
        if not torch.equal(out[0], tokens_nk) or not torch.allclose(out[1], logprobs_nk, atol=_TOLERANCE):
            self._give_up("a recording gave other tokens than the steps that it was made of")
            return tokens_nk, logprobs_nk
        self._held[size] = _Recording(fixed, play, *out)
        return tokens_nk, logprobs_nk

    def _give_up(self, why: str) -> None:
        self.failure = why
        self.forget()
        warnings.warn(
            f"decoding goes on without CUDA graphs, which costs time and changes no token: {why}",
            RuntimeWarning,
            stacklevel=2,
        )
