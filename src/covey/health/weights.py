"""Weights that must not change, and weights that must be the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covey.comm import Comm
from covey.health.words import broken
from covey.types import Fix

# A step looks at one tensor in so many, so that the whole model is looked at every so many steps.
_EVERY = 64
# Checksums stay exact in the float64 that ranks exchange.
_MODULUS = 1 << 50
# Numbers that are looked at together: what is made of them, in 8 bytes each, may be four times their size.
_PIECE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Checksums of frozen tensors at the start of a run, and comparisons of trained ones between ranks.

    `moving` is a reference that follows the policy: frozen from one sync to the next.
    """

    def __init__(
        self,
        frozen: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        moving: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._moving = {f"reference {name}": tensor for name, tensor in (moving or {}).items()}
        self._frozen = {**frozen, **self._moving}
        self._trained = dict(trained)
        self._start = {name: checksum(tensor) for name, tensor in self._frozen.items()}

    def record_reference(self) -> bool:
        """Hold the moving reference to what it is now; True where it was something else before."""
        now = {name: checksum(tensor) for name, tensor in self._moving.items()}
        has_changed = any(self._start[name] != value for name, value in now.items())
        self._start |= now
        return has_changed

    def check_sync(self, step: int, comm: Comm, *, is_behind: bool) -> None:
        """Record the sync that is due after this step. Raise GuardStop (F119) where the reference, which
        `is_behind` the policy, kept its bits."""
        stayed = not self.record_reference() and is_behind
        if any(comm.max([float(stayed)])):
            seen = "the reference was to be drawn to the policy, and kept its bits"
            cause = "A sync was left out, or ref_model_mixup_alpha is so small that float32 rounds it away."
            fix = Fix(text="copy the policy at a sync", edits={"ref_model_mixup_alpha": 1.0})
            raise broken("F119", step, seen, cause, fix)

    def check(self, step: int, comm: Comm) -> None:
        """Raise GuardStop (F119: a frozen tensor has changed; F121: ranks hold other weights)."""
        changed = [n for n in _share(list(self._frozen), step) if checksum(self._frozen[n]) != self._start[n]]
        if any(comm.max([float(len(changed))])):
            seen = f"frozen weights have changed: {', '.join(changed[:3]) or 'on another rank'}"
            cause = "An adapter was merged for a rollout and not taken out exactly."
            if changed and changed[0] in self._moving:
                cause = "The reference was moved between two syncs."
            raise broken("F119", step, seen, cause)
        if comm.world == 1:
            return
        names = _share(list(self._trained), step)
        sums = [float(checksum(self._trained[n])) for n in names]
        highest, lowest = comm.max(sums), comm.max([-x for x in sums])
        apart = [n for n, high, low in zip(names, highest, lowest, strict=True) if high != -low]
        if apart:
            seen = f"the {comm.world} ranks hold other weights in {', '.join(apart[:3])}"
            cause = "A gradient was not averaged over all ranks, or one machine computes wrongly."
            raise broken("F121", step, seen, cause)

    def check_finite(self, step: int, comm: Comm) -> None:
        """Raise GuardStop (F128) where trained weights are not finite on any rank; reads all of them."""
        bad = [n for n, tensor in self._trained.items() if not _is_finite(tensor)]
        if any(comm.max([float(len(bad))])):
            seen = f"weights are not finite: {', '.join(bad[:3]) or 'on another rank'}"
            cause = "The step that was just taken overflowed, or something wrote to the weights after it."
            before = Fix(text="go on from an earlier checkpoint: --resume_from_checkpoint DIR")
            raise broken("F128", step, seen, cause, before, Fix(text="a smaller learning rate"))


def checksum(tensor: Tensor) -> int:
    """Sum of a tensor's bit patterns; equal tensors have equal ones on every machine."""
    bits = _BITS[tensor.element_size()]
    # Added up where the tensor is: what is kept of each part would stand between their memory.
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        total += piece.view(bits).sum(dtype=torch.int64)
    return int(total) % _MODULUS


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor, a part at a time."""
    return tensor.detach().contiguous().view(-1).split(_PIECE)


def _is_finite(tensor: Tensor) -> bool:
    found = torch.ones((), dtype=torch.bool, device=tensor.device)
    for piece in _pieces(tensor):
        found &= torch.isfinite(piece).all()
    return bool(found)


def _share(names: Sequence[str], step: int) -> Sequence[str]:
    """The names that this step checks; the rest have their turn."""
    return names[step % _EVERY :: _EVERY] if len(names) > _EVERY else names[step % max(1, len(names)) :][:1]
