"""The passes of an optimizer step through a small model in one call of the library, without autograd.

Axes: N trained tokens of all micro-batches, one behind the other, M micro-batches, X watched numbers of the
gradient, V vocabulary, D model width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from covey.models.attention_native import SEGMENTS, Families
from covey.models.gradients import own_gradient
from covey.models.head_native import Head
from covey.models.llama import Turns
from covey.models.llama_update_native import Laid, Layers, StackCall
from covey.models.native.library import FLOAT, INT, POINTER, place, structure
from covey.types import MicroBatch, TokenStats

_Pass = structure(
    "_Pass",
    **dict.fromkeys(("tokens", "contexts", "chosen", "families", "longest", "prompt", "is_followed"), INT),
    **dict.fromkeys(("token", "position", "family", *SEGMENTS), POINTER),
    **dict.fromkeys(("token_of", "context_of", "target", "temperature"), POINTER),
    **dict.fromkeys(("grad_logprob", "grad_entropy", "logprob", "entropy"), POINTER),
)
_Passes = structure(
    "_Passes",
    stack=StackCall,
    head=Head,
    **dict.fromkeys(("passes", "is_backward", "known_tokens"), INT),
    **dict.fromkeys(("each", "embedding", "watched"), POINTER),
    num_watched=INT,
    **dict.fromkeys(("copies", "measure"), POINTER),
)
_MEASURE = ctypes.CFUNCTYPE(ctypes.c_int, INT)
_FLOAT_BYTES = ctypes.sizeof(FLOAT)
# Seconds of work for the largest model that has such passes.
_TOKENS_OF_A_CALL = 1 << 13

Advance = Callable[[int], None]
"""Told of how many micro-batches the passes are over."""

Slopes = tuple[Tensor | None, Tensor | None]
"""The gradients of logprobs and entropies (N,); None where there is none."""

Measure = Callable[[int, TokenStats], Slopes]
"""Gives those of one micro-batch, by its number and by what the policy says of it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward and backward passes of micro-batches through a model, in their order, as
    `Policy.passes` gives them."""

    layers: Layers
    turns: Turns
    head_VD: Tensor
    micros: Sequence[MicroBatch]
    watched: Callable[[], Tensor] | None = None

    def look(self, advance: Advance) -> TokenStats:
        """Logprobs and entropies (N,), without backward passes."""
        found, made = self._told(None, None)
        self._run(found, made, advance)
        return made.stats

    def go(self, slopes: Slopes | Measure, advance: Advance) -> tuple[TokenStats, Tensor]:
        """The same with backward passes, which add to the weights' `.grad`; and what the watched piece of
        these is before the first pass and behind each, (M + 1, X)."""
        ahead = list(accumulate((micro.target_N.shape[0] for micro in self.micros), initial=0))
        grads = torch.zeros(2, ahead[-1]).unbind() if callable(slopes) else slopes
        found, made = self._told(*grads)
        assert self.watched is not None, "these are passes to look at"
        watched_X = self.watched()
        copies_MX = watched_X.new_empty(len(self.micros) + 1, watched_X.shape[0])
        found.is_backward, found.num_watched = True, watched_X.shape[0]
        found.watched, found.copies = place(watched_X), place(copies_MX)
        weight_grads, places = Laid().own_gradients(self.layers.weights)
        made.alive.append(places)
        found.stack.grads, found.stack.grad_norm = places, place(weight_grads[-1])
        found.stack.adds = found.head.adds = True
        found.stack.grad_embedding = place(own_gradient(self.layers.known.embedding))
        found.head.grad_weight = place(own_gradient(self.head_VD)) if self.head_VD.requires_grad else None

        def measure(number: int) -> None:
            part = slice(ahead[number], ahead[number + 1])
            own = replace(
                made.stats, logprob_N=made.stats.logprob_N[part], entropy_N=made.stats.entropy_N[part]
            )
            assert callable(slopes)
            for grad_N, slope_N in zip(grads, slopes(number, own), strict=True):
                if grad_N is not None and slope_N is not None:
                    grad_N[part] = slope_N

        self._run(found, made, advance, measure if callable(slopes) else None)
        return made.stats, copies_MX

    def _told(self, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Any, _Made]:
        """What the library is called with, and what has to live as long."""
        made = _Made.of(self.micros, grad_logprob_N, grad_entropy_N)
        tables = self.turns.tables(torch.cat([micro.positions_T for micro in self.micros]))
        found = _Passes(stack=self.layers.same)
        found.stack.cosines, found.stack.sines = map(place, tables)
        embedding_VD = self.layers.known.embedding
        found.embedding, found.known_tokens = place(embedding_VD), embedding_VD.shape[0]
        found.head.weight, (found.head.vocab, found.head.width) = place(self.head_VD), self.head_VD.shape
        found.stack.attention.threads = found.head.threads = torch.get_num_threads()
        made.alive.append(tables)
        return found, made

    def _run(
        self, found: Any, made: _Made, advance: Advance, measure: Callable[[int], None] | None = None
    ) -> None:
        """Call the library for some passes at a time: in between signals are heard."""
        caught: list[BaseException] = []
        copies = found.copies
        for first, end in pairwise(self._calls()):
            heard = None if measure is None else _MEASURE(partial(_hear, measure, caught, first))
            found.measure = heard and ctypes.cast(heard, POINTER)
            found.each, found.passes = ctypes.addressof(made.passes[first]), end - first
            # A call copies what is there before its first pass, as the one before it did behind its last.
            found.copies = copies and copies + first * found.num_watched * _FLOAT_BYTES
            failed = self.layers.library.run_passes(ctypes.byref(found))
            if caught:
                raise caught[0]
            if failed == 1:
                raise IndexError("a token, a target or a context of a micro-batch does not exist")
            if failed:
                raise MemoryError("no memory for the passes of this step")
            advance(end)

    def _calls(self) -> list[int]:
        """The first pass of each call, and the number of all; those of a prompt are in one call."""
        begin, tokens = [0], 0
        for number, micro in enumerate(self.micros):
            is_free = micro.shared is None or not micro.shared.follows
            if tokens >= _TOKENS_OF_A_CALL and is_free:
                begin.append(number)
                tokens = 0
            tokens += micro.tokens_T.shape[0]
        return [*begin, len(self.micros)]


def _hear(measure: Callable[[int], None], caught: list[BaseException], first: int, number: int) -> int:
    """Call back without an error going through C: whether there was one."""
    try:
        measure(first + number)
    except BaseException as error:  # noqa: BLE001 - an interrupt, too, comes out behind the call
        caught.append(error)
    return bool(caught)


@dataclass(frozen=True, slots=True)
class _Made:
    """What the library reads and writes of every micro-batch."""

    passes: Any
    stats: TokenStats
    alive: list[Any]

    @classmethod
    def of(
        cls, micros: Sequence[MicroBatch], grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> _Made:
        counts = [micro.target_N.shape[0] for micro in micros]
        logprob_N, entropy_N = torch.empty(2, sum(counts))
        passes, at = (_Pass * len(micros))(), 0
        grads = [None if g is None else g.contiguous() for g in (grad_logprob_N, grad_entropy_N)]
        of_each = [*grads, logprob_N, entropy_N]
        alive: list[Any] = [grads]
        for number, (micro, count) in enumerate(zip(micros, counts, strict=True)):
            families, shared = Families.of(micro.segments), micro.shared
            stream = [t.contiguous() for t in (micro.tokens_T, micro.positions_T)]
            chosen = [micro.context_U, micro.context_N, micro.target_N, micro.temperature_N]
            chosen = [t.contiguous() for t in chosen]
            alive += [families, stream, chosen]
            passes[number] = _Pass(
                stream[0].shape[0],
                chosen[0].shape[0],
                count,
                len(families.family) - 1,
                families.longest,
                0 if shared is None else micro.segments[0].length,
                shared is not None and shared.is_followed,
                *map(place, stream),
                *families.places(),
                *map(place, chosen),
                *(None if t is None else t.data_ptr() + t.element_size() * at for t in of_each),
            )
            at += count
        return cls(passes, TokenStats(logprob_N=logprob_N, entropy_N=entropy_N), alive)
