"""Weights that must not change, and weights that must be the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from covey.checksums import is_finite
from covey.comm import Comm
from covey.health.saved import BACK
from covey.health.words import broken
from covey.texts import joined, tr
from covey.types import Fix

# A step looks at one tensor in so many, so that the whole model is looked at every so many steps.
_EVERY = 64


class Weights(Protocol):
    """What owns the weights of a run, as far as they are watched."""

    def frozen(self) -> Mapping[str, Tensor]: ...

    def trained(self) -> Mapping[str, Tensor]: ...

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]: ...


class WeightWatch:
    """Checksums of frozen tensors at the start of a run, and comparisons of trained ones between ranks.

    `moving` is a reference that follows the policy: frozen from one sync to the next.
    """

    def __init__(self, owner: Weights, moving: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        self._owner, self._moving = owner, moving
        self._start = self._sums(self._held())

    def _held(self) -> dict[str, Tensor]:
        """What must not change, as it lies now: a step may put other memory in the place of a tensor's."""
        return {**self._owner.frozen(), **self._reference()}

    def _reference(self) -> dict[str, Tensor]:
        return {tr("reference {name}", name=name): tensor for name, tensor in self._moving().items()}

    def _sums(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        return dict(zip(tensors, self._owner.fingerprints(tensors), strict=True))

    def record_reference(self) -> bool:
        """Hold the moving reference to what it is now; True where it was something else before."""
        now = self._sums(self._reference())
        has_changed = any(self._start[name] != value for name, value in now.items())
        self._start |= now
        return has_changed

    def check_sync(self, step: int, comm: Comm, *, is_behind: bool) -> None:
        """Record the sync that is due after this step. Raise GuardStop (F119) where the reference, which
        `is_behind` the policy, kept its bits."""
        stayed = not self.record_reference() and is_behind
        if any(comm.max([float(stayed)])):
            seen = tr("the reference model was to be updated from the policy, but did not change")
            cause = tr(
                "An update was skipped, or ref_model_mixup_alpha is so small that float32 rounds "
                "the change away."
            )
            fix = Fix(
                text=tr("copy the policy at each update of the reference"),
                edits={"ref_model_mixup_alpha": 1.0},
            )
            raise broken("F119", step, seen, cause, fix)

    def check(self, step: int, comm: Comm) -> None:
        """Raise GuardStop (F119: a frozen tensor has changed; F121: ranks hold other weights)."""
        held = self._held()
        now = self._sums({n: held[n] for n in _share(list(held), step)})
        changed = [n for n, value in now.items() if value != self._start[n]]
        if any(comm.max([float(len(changed))])):
            seen = tr(
                "frozen weights have changed: {changed}",
                changed=joined(", ", changed[:3]) or tr("on another rank"),
            )
            cause = tr("An adapter was merged for a rollout and not removed exactly.")
            if changed and changed[0] in self._reference():
                cause = tr("The reference model changed between two of its updates.")
            raise broken("F119", step, seen, cause)
        if comm.world == 1:
            return
        trained = self._owner.trained()
        names = _share(list(trained), step)
        sums = [float(value) for value in self._owner.fingerprints({n: trained[n] for n in names})]
        highest, lowest = comm.max(sums), comm.max([-x for x in sums])
        apart = [n for n, high, low in zip(names, highest, lowest, strict=True) if high != -low]
        if apart:
            seen = tr(
                "the {world} ranks have different weights in {apart}",
                world=comm.world,
                apart=joined(", ", apart[:3]),
            )
            cause = tr("A gradient was not averaged over all ranks, or one machine computes wrong results.")
            raise broken("F121", step, seen, cause)

    def check_finite(self, step: int, comm: Comm) -> None:
        """Raise GuardStop (F128) where trained weights are not finite on any rank; reads all of them."""
        bad = [n for n, tensor in self._owner.trained().items() if not is_finite(tensor)]
        if any(comm.max([float(len(bad))])):
            seen = tr("weights are not finite: {bad}", bad=joined(", ", bad[:3]) or tr("on another rank"))
            cause = tr("The last step overflowed, or something wrote to the weights after it.")
            raise broken("F128", step, seen, cause, BACK, Fix(text=tr("use a smaller learning rate")))


def _share(names: Sequence[str], step: int) -> Sequence[str]:
    """The names that this step checks; the rest have their turn."""
    return names[step % _EVERY :: _EVERY] if len(names) > _EVERY else names[step % max(1, len(names)) :][:1]
