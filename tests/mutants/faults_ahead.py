"""Faults of rollouts that are begun ahead: sampled too early, by wrong versions, out of order, or with
the cache of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from covey.rollout import ahead
from covey.rollout.native.decoding import Decoding
from covey.training import build_source
from covey.training.source import TableSupply
from covey.types import Episode
from mutants.faults import Patch
from mutants.harness import Mutant

AHEAD = {
    "dataset": ["quickstart#128"],
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_tokens_per_micro_batch": 1000,
    "max_steps": 3,
    "max_staleness": 1,
    "learning_rate": 3e-3,
}


def _begins_early(patch: Patch) -> None:
    """The queue is longer than its bound."""
    real = build_source.AheadSource
    patch.setattr(build_source, "AheadSource", lambda **own: real(**{**own, "most": own["most"] + 2}))


def _of_the_future(patch: Patch) -> None:
    """Tokens carry a version that no step has made yet."""
    real = ahead.Share.take

    def take(self: Any, number: int, episode: Episode) -> None:
        rows = tuple(
            replace(row, versions=tuple((v + 9, n) for v, n in row.versions)) for row in episode.tokens
        )
        real(self, number, replace(episode, sequences=rows))

    patch.setattr(ahead.Share, "take", take)


def _twice(patch: Patch) -> None:
    """The rollout before is taken once more."""
    real, kept = ahead.CollectsAhead.finish, []

    def finish(self: Any, begun: Any) -> Any:
        kept.append(real(self, begun))
        return kept[max(0, len(kept) - 2)]

    patch.setattr(ahead.CollectsAhead, "finish", finish)


def _skips(patch: Patch) -> None:
    """The cursor of the prompts is one rollout too far."""
    real = TableSupply.take
    patch.setattr(TableSupply, "take", lambda self, rollout: real(self, rollout + 1))


def _keeps_the_cache(patch: Patch) -> None:
    """Rows go on with keys and values of the weights before."""
    patch.setattr(Decoding, "refill", lambda self, *a, **k: None)


MUTANTS = (
    Mutant("begins a rollout too early", "F114", 3, _begins_early, AHEAD, "max_staleness"),
    Mutant("samples with a version to come", "F114", 1, _of_the_future, AHEAD),
    Mutant("takes a rollout twice", "F122", 2, _twice, AHEAD, "sampled for rollout 0"),
    Mutant("skips the prompts of a rollout", "F122", 1, _skips, AHEAD, "sampled for rollout 1"),
    Mutant("keeps the cache of earlier weights", "F115", 2, _keeps_the_cache, AHEAD),
)
