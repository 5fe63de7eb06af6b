"""Signs of what was sampled: engine and learner that are far apart (F225), ids that are no tokens (F233)."""

from __future__ import annotations

from covey.health.history import History
from covey.health.names import UNKNOWN_IDS
from covey.health.rule import Rule, pct
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Fix

_CORRECTED, _PLAIN, _AGED = "rollout_correction/ess", "sampling/ess", "age/ess"


def low_sample_size(h: History) -> Sign | None:
    """F225: the effective sample size of the weights between engine and learner is a small share of the
    tokens, or that of what earlier weights sampled. A replayed rollout was sampled by another policy, and
    says nothing of the engine."""
    if h.options.get("replay_rollouts"):
        return None
    if (of_aged := h.value(_AGED)) is not None and of_aged < limit("ess_low"):
        return _aged(h, of_aged)
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


def _aged(h: History, value: float) -> Sign:
    """Say that the weights have moved too far from those that sampled."""
    fixes = [Fix(text=tr("use a smaller learning rate"))]
    most = h.options.get("max_staleness", 0)
    if most:
        text = tr("begin rollouts less far ahead")
        fixes.insert(0, Fix(text=text, edits={"max_staleness": most // 2, "async_generate": most > 1}))
    return Sign(
        seen=tr(
            "tokens of earlier weights have an effective sample size of {value:.0%} under the present ones",
            value=value,
        ),
        cause=tr("The weights have moved too far since the tokens were sampled."),
        fixes=tuple(fixes),
        badness=limit("ess_low") / max(value, 1e-6),
    )


def unknown_ids(h: History) -> Sign | None:
    """F233: of the tokens of a rollout, or of an evaluation, more than one in a thousand has an id that the
    tokenizer does not have."""
    shares = {name: h.value(name) for name in (UNKNOWN_IDS, f"eval_{UNKNOWN_IDS}")}
    name, share = max(shares.items(), key=lambda item: item[1] or 0.0)
    if share is None or share <= limit("unknown_ids"):
        return None
    first = h.series[name].first[0].value if name in h.series and h.series[name].first else share
    what = tr("an evaluation") if name.startswith("eval_") else tr("a rollout")
    return Sign(
        seen=tr(
            "{share:.2%} of the tokens of {what} have ids that the tokenizer does not have",
            share=share,
            what=what,
        ),
        cause=tr(
            "The model has sampled them from the start: it belongs to another tokenizer, or it is damaged."
        )
        if first > limit("unknown_ids")
        else tr("Training has made them more likely: the share was {first:.2%} at the start.", first=first),
        fixes=(
            Fix(text=tr("use the tokenizer that the model was trained with: copy its tokenizer.json")),
            Fix(text=tr("add a reward that penalizes them: its argument completion_ids has the ids")),
        ),
        badness=share / limit("unknown_ids"),
    )


F225 = Rule(
    code="F225",
    title="Probabilities of engine and learner differ too much",
    why="The tokens were sampled from another distribution than the one whose gradient is computed. "
    "Importance weights correct for this, but then a few tokens dominate all others; without weights "
    "the gradient is biased.",
    check=low_sample_size,
    streak=int(limit("ess_values")),
    when="the importance weights between engine and learner leave an effective sample size of less than "
    f"{pct('ess_low')} of the tokens",
)


F233 = Rule(
    code="F233",
    title="Ids that the tokenizer does not have",
    why="The model sampled ids for which the tokenizer has no token; most are padding of the vocabulary. "
    "They decode to no text, so rewards are computed as if they were not there.",
    check=unknown_ids,
    each="step",
    when=f"more than {limit('unknown_ids'):.1%} of the tokens of a rollout or an evaluation have ids "
    "that the tokenizer does not have",
)
