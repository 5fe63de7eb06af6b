"""Faults around replayed groups: their rows alone are spared what holds for fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from covey.batching import pack
from covey.learner import annotate
from covey.training.select import SelectingSource
from mutants.harness import Mutant

# From the second step on groups of the first are replayed.
REPLAYED = {
    "replay_buffer_size": 8,
    "reward_funcs": ["accuracy"],
    "num_generations": 4,
    "learning_rate": 1e-3,
    "max_tokens_per_micro_batch": 4000,
}


def _collected(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    real = SelectingSource.next
    return lambda patch: patch.setattr(SelectingSource, "next", lambda self, n: change(real(self, n)))


def _shifted(patch: pytest.MonkeyPatch) -> None:
    """Replayed rows keep the sampler's, so that the fresh ones alone show it."""
    real = annotate.annotate
    patch.setattr(annotate, "annotate", lambda *args: [v + 0.01 for v in real(*args)])


def _unmarked(patch: pytest.MonkeyPatch) -> None:
    real = pack.build_micros
    patch.setattr(pack, "build_micros", lambda *a: [replace(m, age_N=None) for m in real(*a)])


MUTANTS = [
    Mutant(
        "replays groups that nobody marks",
        "F114",
        2,
        _collected(lambda found: replace(found, stale=frozenset())),
        REPLAYED,
        says="was sampled by policy version 0, but the policy is at version 1",
    ),
    Mutant(
        "marks fresh groups as replayed",
        "F114",
        1,
        _collected(lambda found: replace(found, stale=frozenset(range(len(found.groups))))),
        REPLAYED,
        says="which is not an older one",
    ),
    Mutant("shifts old logprobs beside replayed groups", "F116", 2, _shifted, REPLAYED),
    Mutant("takes replayed rows of a forward pass for fresh", "F116", 2, _unmarked, REPLAYED),
]
