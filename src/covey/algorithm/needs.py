"""What a configuration needs of the learner before its first update of a rollout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which annotations a rollout needs, and whether rows with advantage 0 may skip the forward pass.

    `entropy` is of every row in the loss, also of those that skip. `kl_in_reward` says that advantages come
    after the annotations, of which they are made.
    """

    old: bool
    reference: bool
    may_skip_rows: bool
    entropy: bool = False
    kl_in_reward: bool = False


def needs(
    *,
    beta: float,
    steps_per_rollout: int,
    kl_in_reward: bool = False,
    has_entropy_bonus: bool = False,
    top_entropy_quantile: float = 1.0,
) -> Needs:
    """Old logprobs only where a rollout is trained on more than once; a reference only with a KL term.

    With one optimizer step a rollout the current policy is the one that sampled, so its logprobs are the old
    ones. A row with advantage 0 has an exactly zero gradient unless a KL term or an entropy bonus reaches it.
    `beta` is the largest weight that the KL has in the run.
    """
    return Needs(
        old=steps_per_rollout > 1 or (kl_in_reward and beta != 0.0),
        reference=beta != 0.0,
        may_skip_rows=beta == 0.0 and not has_entropy_bonus,
        entropy=top_entropy_quantile < 1.0,
        kl_in_reward=kl_in_reward and beta != 0.0,
    )
