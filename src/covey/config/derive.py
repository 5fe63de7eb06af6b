"""The options that follow from others when nobody types them.

Pure arithmetic on what was typed. Whether the outcome is a batch that can run is the business of
`covey.plan`; here even a contradiction comes out as numbers, so that the plan can say what is wrong with
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.config.schema import default_of

PER_DEVICE = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
PER_GENERATION = "steps_per_generation"
GENERATION_BATCH = "generation_batch_size"

# One process takes eight forward passes of eight: eight prompts a step, since one often has no signal.
_DEFAULT_PASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The four batch options after derivation, and for each derived one the words for where it came from."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    generation_batch_size: int
    sources: Mapping[str, str]


def derive_batch(typed: Mapping[str, Any], num_processes: int) -> BatchOptions:
    """Return the batch options that `typed` (names to values, batch options or not) leads to."""
    per_device = typed.get(PER_DEVICE, default_of(PER_DEVICE))
    sources: dict[str, str] = {}
    if ACCUMULATION in typed:
        accumulation = typed[ACCUMULATION]
    elif {PER_DEVICE, PER_GENERATION, GENERATION_BATCH} & set(typed):
        accumulation = 1
        sources[ACCUMULATION] = "default"
    else:
        accumulation = max(1, _DEFAULT_PASSES // num_processes)
        sources[ACCUMULATION] = f"default for {num_processes} process{'es' if num_processes > 1 else ''}"
    per_pass = max(1, num_processes * per_device)
    if PER_GENERATION in typed:
        per_generation = typed[PER_GENERATION]
    elif GENERATION_BATCH in typed:
        per_generation = max(1, typed[GENERATION_BATCH] // per_pass)
        sources[PER_GENERATION] = f"derived from {GENERATION_BATCH}"
    else:
        per_generation = accumulation
        sources[PER_GENERATION] = f"derived from {ACCUMULATION}"
    generation_batch = typed.get(GENERATION_BATCH)
    if generation_batch is None:
        generation_batch = num_processes * per_device * per_generation
        sources[GENERATION_BATCH] = f"derived from {num_processes} x {PER_DEVICE} x {PER_GENERATION}"
    return BatchOptions(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        generation_batch_size=generation_batch,
        sources=sources,
    )


def derive_epsilon_high(typed: Mapping[str, Any]) -> tuple[float, str]:
    """Return the upper clipping distance and its source: 0.28, or epsilon where that is typed, as in TRL."""
    if "epsilon" in typed:
        return typed["epsilon"], "derived from epsilon"
    return EPSILON_HIGH, "default"


EPSILON_HIGH = 0.28
"""The upper clipping distance when neither bound is typed."""
