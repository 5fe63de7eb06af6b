"""Learning rates of parts of a model, as multiples of the learning rate of the step."""

from __future__ import annotations

from covey.models.policy import Policy
from covey.options.training import OptimizerOptions
from covey.types.media import Part


def rate_factors(policy: Policy, options: OptimizerOptions) -> dict[str, float]:
    """Return what the learning rate of trained tensors is multiplied by, by their names, where a part of the
    model that sees images has a rate of its own.

    The schedule is the same for all parts, so a factor holds from the first step to the last.
    """
    rates: dict[Part, float | None] = {"vit": options.vit_lr, "aligner": options.aligner_lr}
    own = {part: rate for part, rate in rates.items() if rate is not None}
    if policy.vision is None or not own:
        return {}
    factors = {part: rate / options.learning_rate for part, rate in own.items()}
    named = ((n, policy.part_of(n)) for n, p in policy.named_parameters() if p.requires_grad)
    return {name: factors[part] for name, part in named if part in factors}
