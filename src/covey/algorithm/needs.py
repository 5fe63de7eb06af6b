"""What a configuration needs of the learner before its first update of a rollout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which annotations a rollout needs, and whether rows with advantage 0 may skip the forward pass."""

    old: bool
    reference: bool
    may_skip_rows: bool


def needs(*, beta: float, steps_per_rollout: int) -> Needs:
    """Old logprobs only where a rollout is trained on more than once; a reference only with a KL term.

    With one optimizer step a rollout the current policy is the one that sampled, so its logprobs are the old
    ones. A row with advantage 0 has an exactly zero gradient unless the KL term reaches it.
    """
    return Needs(old=steps_per_rollout > 1, reference=beta != 0.0, may_skip_rows=beta == 0.0)
