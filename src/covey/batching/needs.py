"""What a configuration needs of the learner before its first update of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from covey.options.algorithm import AlgorithmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which annotations a rollout needs, and whether rows with advantage 0 may skip the forward pass.

    `entropy` is of every row in the loss, also of those that skip. `kl_in_reward` says that advantages come
    after the annotations, of which they are made. `decoupled`: old logprobs are those of the weights that
    begin to learn from a rollout, whichever have sampled it.
    """

    old: bool
    reference: bool
    may_skip_rows: bool
    entropy: bool = False
    kl_in_reward: bool = False
    decoupled: bool = False


def needs(options: AlgorithmOptions, steps_per_rollout: int) -> Needs:
    """Old logprobs only where a rollout is trained on more than once; a reference only with a KL term.

    With one optimizer step a rollout the current policy is the one that sampled, so its logprobs are the old
    ones. A row with advantage 0 has an exactly zero gradient unless a KL term or an entropy bonus reaches it.
    """
    has_kl, in_reward = bool(options.beta or options.beta_end), options.kl_in_reward
    return Needs(
        old=steps_per_rollout > 1 or (in_reward and has_kl),
        reference=has_kl,
        may_skip_rows=not (has_kl or has_entropy_bonus(options)),
        entropy=options.top_entropy_quantile < 1.0,
        kl_in_reward=in_reward and has_kl,
        decoupled=options.use_decoupled_loss,
    )


def has_entropy_bonus(options: AlgorithmOptions) -> bool:
    """Whether the loss has an entropy bonus at any step."""
    return bool(options.entropy_coef or options.entropy_coef_end or options.use_adaptive_entropy)
