"""A sign of engine and learner that are far apart (F225)."""

from __future__ import annotations

from covey.health.history import History
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Fix

_CORRECTED, _PLAIN = "rollout_correction/ess", "sampling/ess"


def low_sample_size(h: History) -> Sign | None:
    """F225: the effective sample size of the weights between engine and learner is a small share of the
    tokens. A replayed rollout was sampled by another policy, and says nothing of the engine."""
    if h.options.get("replay_rollouts"):
        return None
    value = h.value(_CORRECTED, _PLAIN)
    if value is None or value >= limit("ess_low"):
        return None
    is_corrected = h.value(_CORRECTED) is not None
    gap = h.value("sampling/sampling_logp_difference/mean")
    apart = "" if gap is None else tr("; log-probabilities differ by {gap:.3g} on average", gap=gap)
    fixes = [Fix(text=tr("let the engine compute in the dtype of the run"))]
    if not is_corrected:
        text = tr("use importance weights for the tokens, truncated at a maximum")
        fixes.append(Fix(text=text, edits={"rollout_importance_sampling_mode": "token_truncate"}))
    return Sign(
        seen=tr(
            "the importance weights between engine and learner leave an effective sample size of "
            "{value:.0%} of the tokens{apart}",
            value=value,
            apart=apart,
        ),
        cause=tr(
            "The engine rounds differently from the learner, or filters the tokens that it samples from."
        ),
        fixes=tuple(fixes),
        badness=limit("ess_low") / max(value, 1e-6),
    )
