"""Every loss by its name, found in the files of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import covey.algorithm.loss_types as package
from covey.algorithm.loss_types.declare import Loss
from covey.modules import values_in


def _declared() -> dict[str, Loss]:
    found = values_in(package, Loss)
    losses = {loss.name: loss for loss in sorted(found, key=lambda loss: (loss.place, loss.name))}
    assert len(losses) == len(found), "two losses have the same name"
    assert all((loss.term is None) != (loss.share is None) for loss in found), "a loss is a term or a share"
    return losses


LOSSES: Mapping[str, Loss] = MappingProxyType(_declared())
"""Every loss by its name, in the order of `--help`."""

SUMS_OF_SEQUENCES = frozenset(name for loss in LOSSES.values() for name in loss.sums_of_sequences)
"""The metrics of all losses that add up sequences; all others add up tokens."""

if TYPE_CHECKING:
    LossType = str
else:
    LossType = Literal[tuple(LOSSES)]


def loss_named(name: str) -> Loss:
    """Return the loss of this name. Raises ValueError where there is none."""
    if name not in LOSSES:
        raise ValueError(f"There is no loss {name!r}; there are {', '.join(LOSSES)}.")
    return LOSSES[name]


def losses_reading(option: str) -> tuple[str, ...]:
    """Return the names of the losses that read an option."""
    names = tuple(name for name, loss in LOSSES.items() if option in loss.options)
    assert names, f"no loss declares the option {option}"
    return names


def summary() -> str:
    """Return what each loss does and what it divides by, for `--help`."""
    does, divides_by = _by_name(lambda loss: loss.summary), _by_name(lambda loss: loss.average.value)
    return f"{does}. Terms of tokens are divided by: {divides_by}."


def _by_name(said: Callable[[Loss], str]) -> str:
    """Return one sentence for each text that losses have of themselves, with the names of these losses."""
    names: dict[str, list[str]] = {}
    for loss in LOSSES.values():
        names.setdefault(said(loss), []).append(loss.name)
    return "; ".join(f"{', '.join(those)}: {text}" for text, those in names.items())
