"""Strides of decoding steps that are recorded on a GPU once for each size and played again.

A decoding step is hundreds of small kernels, and a GPU waits for the host that launches them one by one. A
recording (a CUDA graph) is launched whole. It reads and writes the memory that it was made with, so the
inputs of a stride are copied into tensors that stay.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from covey.kernels.draws import Drawn
from covey.kernels.sizes import step_up

# Makes a recording of what a function computes, without computing it; the recording is played by a call.
Record = Callable[[Callable[[], None]], Callable[[], None]]
# Computes a stride on tensors that stay: what rows drew, k tokens each.
Compute = Callable[[], Drawn]

MOST_HELD = 48
"""Recordings that are held at a time. A rollout of 64 rows and 2,048 tokens takes about 25 sizes."""

# Recorded sizes between two powers of two: each costs half a second, and memory. Spare rows cost little, as a
# step of few rows waits for the weights, so there are two. Attention reads every column, so there are four,
# which leaves a tenth of them unused in the mean.
_ROW_SIZES, _COLUMN_SIZES, _COLUMN_STEP = 2, 4, 128
# Logprobs of a recording and of the plain steps, which may take other kernels.
_TOLERANCE = 1e-2


def recorded_rows(needed: int) -> int:
    """The rows of the recording that so many are played by."""
    return step_up(needed, 1, _ROW_SIZES)


def recorded_columns(needed: int) -> int:
    """The same of the columns that attention reads of each row."""
    return step_up(needed, _COLUMN_STEP, _COLUMN_SIZES)


@dataclass(slots=True)
class CudaGraphs:
    """Records as CUDA graphs; the plain run before has chosen kernels.

    All graphs share one pool of memory. That is safe in whatever order they are played: what a graph reads
    and what it leaves lie outside of the pool, and nobody reads what is inside once it has been played.
    """

    _stream: Any = None
    _pool: Any = None
    _graphs: WeakSet[Any] = field(default_factory=WeakSet)

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record what `compute` launches; the current stream is the same afterwards, also if that fails."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self._graphs:
            # torch refuses the handle of a pool whose last graph is gone.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), _no_collection():
            try:
                # Other threads may use the GPU meanwhile: a reward of the user's, say.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                compute()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._graphs.add(graph)
        return graph.replay  # type: ignore[no-any-return]

    def _abandon(self, graph: Any) -> None:
        """End a recording that failed. torch tells its allocator of the end last, so that an error before it
        would leave the allocator waiting: it would never again free what it caches."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):
            # Raises where the allocator knows already, and then nothing is to be released.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python frees nothing by itself within it: what it frees may be of the GPU, which is not allowed during
    a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True)
class _Recording:
    inputs: tuple[Tensor, ...]
    play: Callable[[], None]
    drawn: Drawn


class Recordings:
    """Recordings by cache and size; `failure` says why there are no more, and then every stride is computed
    plainly.

    The first stride of each size is computed both ways and compared. Where `most` are held, the one that was
    not played for longest is let go. `num_made` counts all that were ever made.
    """

    def __init__(self, record: Record | None = None, *, most: int = MOST_HELD) -> None:
        self._record = record or CudaGraphs()
        self._most = most
        self._held: OrderedDict[tuple[int, ...], _Recording] = OrderedDict()
        self.num_made = 0
        self.failure = ""

    def __len__(self) -> int:
        """How many are held."""
        return len(self._held)

    def forget(self, kept: Collection[int] = ()) -> None:
        """Drop the recordings of all caches but those `kept`: something that they read lies elsewhere
        now."""
        for key in [key for key in self._held if key[0] not in kept]:
            del self._held[key]

    def play(
        self,
        cache: int,
        size: tuple[int, ...],
        inputs: tuple[Tensor, ...],
        compute: Callable[..., Compute],
    ) -> Drawn:
        """Draw a stride of rows over the cache of this number, (n, k), by playing its recording or making
        one. `compute(*tensors)` returns the function that draws from inputs of this size."""
        key = cache, *size
        held = self._held.get(key)
        if held is None:
            return compute(*inputs)() if self.failure else self._made(key, inputs, compute)
        self._held.move_to_end(key)
        for tensor, value in zip(held.inputs, inputs, strict=True):
            tensor.copy_(value)
        held.play()
        return held.drawn

    def _made(
        self, key: tuple[int, ...], inputs: tuple[Tensor, ...], compute: Callable[..., Compute]
    ) -> Drawn:
        """Compute a stride plainly, record it and play it: a second time it writes what it wrote before."""
        while len(self._held) >= self._most:
            self._held.popitem(last=False)
        fixed = tuple(tensor.clone() for tensor in inputs)
        steps = compute(*fixed)
        plain = steps()
        given = [value for value in plain if value is not None]
        out = Drawn(*map(torch.zeros_like, given))

        def all_of_it() -> None:
            for result, value in zip(out, steps(), strict=True):
                if result is not None and value is not None:
                    result.copy_(value)

        try:
            play = self._record(all_of_it)
            play()
        except RuntimeError as error:
            self._give_up((str(error).strip().splitlines() or [type(error).__name__])[0])
            return plain
        is_close = torch.allclose(out.logprobs, plain.logprobs, atol=_TOLERANCE)
        if not torch.equal(out.tokens, plain.tokens) or not is_close:
            self._give_up("a recording gave other tokens than the steps that it was made of")
            return plain
        self._held[key] = _Recording(fixed, play, out)
        self.num_made += 1
        return plain

    def _give_up(self, why: str) -> None:
        self.failure = why
        self.forget()
