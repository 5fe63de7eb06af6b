"""Faults that any backend may have, planted on the backend that a run has built: what must name each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from contract.backends import SHIFTED, TURNED, Kind
from contract.cells import STEPS
from covey.rollout import moving
from covey.training import build
from covey.types import TokenSequence

Patch = pytest.MonkeyPatch
# Changes a backend that has just been built in the process of a rank.
Change = Callable[[Any, int], None]
CONTRACT = "contract"
"""Stands for a code where no guard can see a fault, and a comparison with the oracle must."""


def _as_it_is(backend: Any, rank: int) -> None:
    """A fault of no backend."""


def _plant_arrivals(patch: Patch, arrives: Callable[[TokenSequence], TokenSequence]) -> None:
    """Change each row that another rank has sent, as it is read."""
    real = moving._unpack

    def unpack(*args: Any) -> Any:
        rows = real(*args)
        return rows and [(number, arrives(row)) for number, row in rows]

    patch.setattr(moving, "_unpack", unpack)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the code that names it; `or_else` does where the guard behind that is unknown on a
    backend. It is planted in a full training or in that of an adapter, or in the run that goes on with one
    that was stopped. `arrives` changes each row that another rank has sent; such a fault is of no backend."""

    name: str
    code: str
    change: Change = _as_it_is
    or_else: str = CONTRACT
    tuner: str = "full"
    is_resumed: bool = False
    arrives: Callable[[TokenSequence], TokenSequence] | None = None

    def plant(self, patch: Patch, rank: int) -> None:
        """Have every backend that is built from here on changed, and every row that arrives."""
        if self.arrives is not None:
            _plant_arrivals(patch, self.arrives)
        real = build.backend_for

        def made(*args: Any, **kwargs: Any) -> Any:
            backend = real(*args, **kwargs)
            self.change(backend, rank)
            return backend

        patch.setattr(build, "backend_for", made)

    def named_by(self, kind: Kind) -> str:
        """What must name it on a backend."""
        if self.name in kind.named:
            return kind.named[self.name]
        return self.or_else if self.code in kind.unknown else self.code


def _after_last(change: Callable[[torch.Tensor, int], Any]) -> Change:
    """Change each tensor of a step's gradient, in place, once it is complete."""

    def plant(backend: Any, rank: int) -> None:
        real = backend.backward

        def backward(micro: Any, loss: Any, *, last: bool) -> Any:
            out = real(micro, loss, last=last)
            if last:
                for tensor in backend.masters.masters:
                    if tensor.grad is not None:
                        change(tensor.grad, rank)
            return out

        backend.backward = backward

    return plant


def _before_step(change: Callable[[list[torch.Tensor], int], Any]) -> Change:
    """Change the gradient, in place, when it is about to be clipped and stepped."""

    def plant(backend: Any, rank: int) -> None:
        real = backend.step

        def step(rate: float) -> Any:
            change([t.grad for t in backend.masters.masters if t.grad is not None], rank)
            return real(rate)

        backend.step = step

    return plant


def _is_not_reduced(backend: Any, rank: int) -> None:
    """No backward pass is told that it is the last."""
    real = backend.backward
    backend.backward = lambda micro, loss, *, last: real(micro, loss, last=False)


def _averages(backend: Any, rank: int) -> None:
    backend.grad_scale /= backend.dp_world


def _keeps_the_last_micro_batch(backend: Any, rank: int) -> None:
    real = backend.backward

    def backward(micro: Any, loss: Any, *, last: bool) -> Any:
        said = []

        def weighed(stats: Any, of: Any) -> Any:
            said.append(loss(stats, of))
            return said[0] if last else replace(said[0], loss=0.0 * said[0].loss)

        stats, _ = real(micro, weighed, last=last)
        return stats, said[0]

    backend.backward = backward


def _steps_with(owner: Any, name: str, replaced: Callable[[Any], Any]) -> Change:
    """A step within which a function of torch is another one, made of it."""

    def plant(backend: Any, rank: int) -> None:
        real = backend.step

        def step(rate: float) -> Any:
            with Patch.context() as patch:
                patch.setattr(owner, name, replaced(getattr(owner, name)))
                return real(rate)

        backend.step = step

    return plant


def _twice(clip: Callable[..., Any]) -> Callable[..., Any]:
    """By the factor that was computed once."""

    def clip_twice(*args: Any, **kwargs: Any) -> None:
        clip(*args, **kwargs)
        clip(*args, **kwargs)

    return clip_twice


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


_clips = partial(_steps_with, torch.nn.utils, "clip_grads_with_norm_")


def _after_steps(first: int, change: Callable[[Any], Any]) -> Change:
    def plant(backend: Any, rank: int) -> None:
        real, taken = backend.step, 0

        def step(rate: float) -> Any:
            nonlocal taken
            out, taken = real(rate), taken + 1
            if taken >= first:
                with torch.no_grad():
                    change(backend)
            return out

        backend.step = step

    return plant


def _changes_frozen_weights(backend: Any) -> None:
    for tensor in backend.frozen().values():
        tensor.mul_(1.001)


def _spoils_a_weight(backend: Any) -> None:
    next(iter(backend.trained().values())).mul_(math.nan)


def _annotates(which: str, by: float) -> Change:
    def plant(backend: Any, rank: int) -> None:
        real = backend.annotate

        def annotate(micros: Any, asked: str, advance: Any) -> Any:
            value_N = real(micros, asked, advance)
            return value_N + by if asked == which else value_N

        backend.annotate = annotate

    return plant


def _loses_moments(backend: Any, rank: int) -> None:
    real = backend.load_shards

    def load(saved: Any) -> None:
        real(saved)
        for group in backend.masters._groups:
            # Of moments in CPU memory the tensors have none of their own.
            with group.offloaded.on_device():
                for moment in group.adam.moments():
                    moment.zero_()

    backend.load_shards = load


def _shifts_logprobs(row: TokenSequence) -> TokenSequence:
    """Each token has the logprob of the one behind it, and the last one its own."""
    return replace(row, logprobs=np.append(row.logprobs[1:], row.logprobs[-1:]))


def _turns_logprobs(row: TokenSequence) -> TokenSequence:
    """Each token has the logprob of the one before it, and the first one that of the last."""
    return replace(row, logprobs=np.roll(row.logprobs, 1))


FAULTS = (
    Fault(name="is zeroed", code="F102", change=_after_last(lambda g, rank: g.zero_())),
    Fault(name="is negated", code="F127", change=_after_last(lambda g, rank: g.mul_(-1))),
    Fault(name="is doubled", code="F127", change=_after_last(lambda g, rank: g.mul_(2))),
    Fault(
        name="is doubled before it is stepped",
        code=CONTRACT,
        change=_before_step(lambda gradients, rank: [g.mul_(2) for g in gradients]),
    ),
    Fault(name="is not reduced over ranks", code="F127", change=_is_not_reduced),
    Fault(name="is averaged where a sum is due", code="F127", change=_averages),
    Fault(
        name="is another one on each rank",
        code="F121",
        change=_after_last(lambda g, rank: g.mul_(1 + 1e-4 * rank)),
    ),
    Fault(
        name="is of the last micro-batch alone",
        code="F123",
        or_else="F127",
        change=_keeps_the_last_micro_batch,
    ),
    Fault(
        name="lacks a tensor", code="F124", change=_before_step(lambda gradients, rank: gradients[2].zero_())
    ),
    Fault(
        name="is NaN on one rank",
        code="F101",
        change=_before_step(lambda gradients, rank: gradients[2].mul_(math.nan if rank == 0 else 1.0)),
    ),
    Fault(name="is clipped twice", code=CONTRACT, change=_clips(_twice)),
    Fault(name="is not clipped", code=CONTRACT, change=_clips(_nothing)),
    Fault(name="is not stepped", code="F103", change=_steps_with(torch.optim.AdamW, "step", _nothing)),
    Fault(name="old logprobs are of other weights", code="F116", change=_annotates("old", -0.05)),
    Fault(name="the reference is not the start", code="F117", change=_annotates("reference", -0.3)),
    Fault(
        name="frozen weights change",
        code="F119",
        tuner="lora",
        change=_after_steps(1, _changes_frozen_weights),
    ),
    Fault(name="a weight is NaN at the end", code="F128", change=_after_steps(STEPS, _spoils_a_weight)),
    Fault(name="moments are lost at a resume", code=CONTRACT, is_resumed=True, change=_loses_moments),
    Fault(name=SHIFTED, code="F110", arrives=_shifts_logprobs),
    Fault(name=TURNED, code=CONTRACT, arrives=_turns_logprobs),
)
"""Each is said of the gradient, where nothing else is."""

BY_NAME = {fault.name: fault for fault in FAULTS}
