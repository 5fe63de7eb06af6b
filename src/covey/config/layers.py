"""Flags over a file.

A resolved config.yaml holds every value, also those that only follow from others. Such a value is not a
choice: under a flag that changes what it follows from it is derived anew. So `covey train config.yaml --seed
7` changes the data order too, just as `--seed 7` would have done in the first command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.derive import (
    ACCUMULATION,
    GENERATION_BATCH,
    PER_DEVICE,
    PER_GENERATION,
    RULES,
    follows,
)
from covey.config.take import Typed
from covey.options.schema import default_of


def merge(below: Mapping[str, Typed], flags: Mapping[str, Typed]) -> dict[str, Typed]:
    """Return the options of a file overridden by flags, without the file's values that the flags make
    obsolete."""
    obsolete = _obsolete({name: typed.value for name, typed in below.items()}, set(flags))
    return {name: typed for name, typed in below.items() if name not in obsolete} | dict(flags)


def _obsolete(file: Mapping[str, Any], flags: set[str]) -> set[str]:
    gone = {
        name for name, rule in RULES.items() if name in file and rule.inputs & flags and follows(name, file)
    }
    return gone | _obsolete_batch(file, flags)


def _obsolete_batch(file: Mapping[str, Any], flags: set[str]) -> set[str]:
    if PER_GENERATION in flags or GENERATION_BATCH in flags:
        # Two names of one size: a flag for either replaces both of the file's.
        return {PER_GENERATION, GENERATION_BATCH}
    if PER_GENERATION not in file:
        return set()
    gone: set[str] = set()
    if flags & {PER_DEVICE, ACCUMULATION, "nproc_per_node"} and file.get(GENERATION_BATCH) == _restated(file):
        gone.add(GENERATION_BATCH)
    if ACCUMULATION in flags and file.get(ACCUMULATION) == file[PER_GENERATION]:
        gone.add(PER_GENERATION)
    return gone


def _restated(file: Mapping[str, Any]) -> int:
    processes: int = file.get("nproc_per_node", 1)
    per_device: int = file.get(PER_DEVICE, default_of(PER_DEVICE))
    return processes * per_device * int(file[PER_GENERATION])
