"""Signs that sampling goes wrong: entropy, lengths, truncation and repetition (F201 to F206, F219, F229).

Each is measured against the first rollout. A model that has learned its task is surer of itself, and may
write more or less than before. So most of these signs ask for more where the run improves: where its reward
has risen and no part of it has fallen.
"""

from __future__ import annotations

from covey.health.baseline import fallen_parts, is_better
from covey.health.history import History
from covey.health.names import CUT, ENDED, ENTROPY, LENGTH, PAID_LENGTH, REPETITIVE
from covey.health.rule import LASTING, Rule, num, pct
from covey.health.saved import BACK
from covey.health.sign import Sign
from covey.health.signs.groups import entropy_gone, no_signal, slower, too_large
from covey.health.thresholds import limit
from covey.texts import joined, tr
from covey.types import Fix


def entropy_collapse(h: History) -> Sign | None:
    """F201: the entropy is low, a small part of what it was, and the run is no better for it."""
    series = h.get(*ENTROPY)
    if series is None or is_better(h):
        return None
    bound = min(limit("entropy_low"), limit("entropy_low_share") * series.begin)
    if series.now >= bound:
        return None
    return Sign(
        seen=tr(
            "entropy {begin:.3g} -> {now:.3g} nats a token, and {no_better}",
            begin=series.begin,
            now=series.now,
            no_better=_no_better(h),
        ),
        cause=tr("The updates are too large, or clipping limits unlikely tokens as much as likely ones."),
        fixes=(_wider(h), slower(h)),
        badness=bound / max(series.now, 1e-12),
    )


def collapsed(h: History) -> Sign | None:
    """F229: no group has a signal, and the entropy is next to nothing of what it was."""
    gone, flat = entropy_gone(h), no_signal(h)
    if gone is None or flat is None:
        return None
    return Sign(
        seen=tr(
            "entropy {begin:.3g} -> {now:.3g} nats a token; {flat}",
            begin=gone.begin,
            now=gone.now,
            flat=flat.seen,
        ),
        cause=too_large(h),
        fixes=(h.slower(by=10), BACK),
        badness=1.0,
    )


def _no_better(h: History) -> str:
    """In what the run is no better."""
    parts = fallen_parts(h)
    if parts:
        return joined(", ", [tr("{name} {words}", name=name, words=change.words) for name, change in parts])
    return tr("the reward has not risen") if not h.has_risen() else tr("the held-out reward has fallen")


def _wider(h: History) -> Fix:
    high = h.option("epsilon_high")
    if high is not None and high >= 0.28:
        if h.option("num_iterations") == 1:
            if bonus := h.option("entropy_coef"):
                text = tr("use a larger bonus for entropy")
                return Fix(text=text, edits={"entropy_coef": float(f"{2 * bonus:.2g}")})
            return Fix(text=tr("add a bonus for entropy"), edits={"entropy_coef": 0.001})
        return Fix(text=tr("make fewer passes over each rollout"), edits={"num_iterations": 1})
    return Fix(text=tr("allow unlikely tokens to grow more"), edits={"epsilon_high": 0.28})


def entropy_surge(h: History) -> Sign | None:
    """F202: the entropy is high, far above what it was; twice as far where the run improves."""
    series = h.get(*ENTROPY)
    if series is None:
        return None
    better = is_better(h)
    times = limit("surge_of_better") if better else 1.0
    bound = times * max(limit("entropy_high"), limit("entropy_high_share") * series.begin)
    if series.now <= bound:
        return None
    seen = tr("entropy {begin:.3g} -> {now:.3g} nats a token", begin=series.begin, now=series.now)
    return Sign(
        seen=seen if better else tr("{seen}, and {no_better}", seen=seen, no_better=_no_better(h)),
        cause=tr("The updates are too large, or the reward does not tell good completions from bad ones."),
        fixes=(
            h.slower(),
            _pull(h),
        ),
        badness=series.now / bound,
    )


def _pull(h: History) -> Fix:
    if beta := h.option("beta"):
        text = tr("use a larger beta, which pulls back more strongly")
        return Fix(text=text, edits={"beta": float(f"{2 * beta:.2g}")})
    return Fix(text=tr("add a KL term that pulls towards the initial model"), edits={"beta": 0.04})


def length_explosion(h: History) -> Sign | None:
    """F203: completions are several times longer, and the run is no better for it, or they grew that much
    within 50 rollouts and the reward does not say that something else was learned."""
    series = h.get(LENGTH)
    if series is None:
        return None
    bound = limit("length_long_share") * series.begin
    if series.now <= bound:
        return None
    better = is_better(h)
    if better and not _grew_at_once(h):
        return None
    seen = tr("mean length {begin:.4g} -> {now:.4g} tokens", begin=series.begin, now=series.now)
    return Sign(
        seen=tr("{seen}, within 50 rollouts", seen=seen)
        if better
        else tr("{seen}, and {no_better}", seen=seen, no_better=_no_better(h)),
        cause=tr(
            "The loss gives each token of a long wrong completion less weight (loss_type grpo), or "
            "the reward grows with length."
        ),
        fixes=(
            Fix(text=tr("use a loss in which every token has the same weight"), edits={"loss_type": "dapo"}),
            h.slower(),
        ),
        badness=series.now / bound,
    )


def _grew_at_once(h: History) -> bool:
    """Whether lengths have tripled within 50 rollouts; not where the reward is known not to follow them."""
    paid = h.series.get(PAID_LENGTH)
    if paid is not None and paid.now < limit("length_correlation"):
        return False
    series = h.series[LENGTH]
    window = int(limit("length_window"))
    before = series.last[-window - 1].value if len(series.last) > window else series.begin
    return series.now > limit("length_long_share") * before


def length_collapse(h: History) -> Sign | None:
    """F204: completions shrink to a fraction while the run is no better, or to next to nothing."""
    series = h.get(ENDED, LENGTH)
    if series is None:
        return None
    better = is_better(h)
    share = limit("length_nothing_share" if better else "length_short_share")
    bound = share * series.begin
    if series.now >= bound:
        return None
    seen = tr("mean length {begin:.4g} -> {now:.4g} tokens", begin=series.begin, now=series.now)
    return Sign(
        seen=seen if better else tr("{seen}; {no_better}", seen=seen, no_better=_no_better(h)),
        cause=tr(
            "The reward pays for the format only, or the loss divides by length (loss_type grpo), "
            "which favors short completions."
        ),
        fixes=(
            Fix(text=tr("use a loss that does not divide by length"), edits={"loss_type": "dr_grpo"}),
            Fix(text=tr("a smaller weight for the reward that pays for form: --reward_weights")),
        ),
        badness=bound / max(series.now, 1e-9),
    )


def truncation_spiral(h: History) -> Sign | None:
    """F205: many completions are cut, many more than at the start."""
    series = h.get(CUT)
    if series is None:
        return None
    bound = max(limit("truncated"), series.begin + limit("truncated_rise"))
    if series.now <= bound:
        return None
    ended, maximum = h.value(ENDED), h.option("max_completion_length")
    at = tr(" at {maximum:g} tokens", maximum=maximum) if maximum else ""
    usual = tr("; completions that end have {ended:.4g} tokens", ended=ended) if ended else ""
    longer = Fix(text=tr("allow longer completions"))
    if maximum:
        longer = Fix(text=tr("allow longer completions"), edits={"max_completion_length": int(2 * maximum)})
    return Sign(
        seen=tr(
            "{now:.0%} of the completions are truncated{at} ({begin:.0%} at the start){usual}",
            now=series.now,
            at=at,
            begin=series.begin,
            usual=usual,
        ),
        cause=tr(
            "Completions get longer, truncated ones are scored as wrong, and the model does not "
            "learn from that how to end."
        ),
        fixes=(
            longer,
            Fix(text=tr("do not train on truncated completions"), edits={"mask_truncated_completions": True}),
        ),
        badness=series.now / bound,
    )


def truncated_from_the_start(h: History) -> Sign | None:
    """F219: next to no completion of the first rollouts ends by itself."""
    series = h.get(CUT)
    if series is None:
        return None
    newest, bound = series.last[-1].value, limit("truncated_at_start")
    if min(v.value for v in (*series.first, series.last[-1])) < bound:
        return None
    return Sign(
        seen=tr("{newest:.0%} of the completions are truncated from the first rollout on", newest=newest),
        cause=tr(
            "The model does not end its turn: a base model without chat training, a template "
            "whose end token is not the one that stops sampling, or a max_completion_length "
            "far too short."
        ),
        fixes=(
            Fix(
                text=tr(
                    "look in rollouts/ whether completions continue after their answer; if so, the "
                    "end token or the chat template is wrong"
                )
            ),
            Fix(
                text=tr(
                    "if the model never samples an end token, as base models do, end completions at a text "
                    "that follows the answer: --stop_words '</answer>'"
                )
            ),
            Fix(
                text=tr(
                    "if completions are truncated in the middle of an answer, use a larger "
                    "max_completion_length"
                )
            ),
        ),
        badness=1.0,
    )


def repetition(h: History) -> Sign | None:
    """F206: completions that repeat one token or one phrase."""
    series = h.get(REPETITIVE)
    if series is None:
        return None
    newest = series.last[-1]
    if newest.value <= limit("repetitive") or newest.value * newest.count < limit("repetitive_least"):
        return None
    return Sign(
        seen=tr(
            "{value:.0%} of {count} completions repeat one token or one phrase",
            value=newest.value,
            count=newest.count,
        ),
        cause=tr(
            "The model has diverged; or, if it began at the first rollout, the weights used for "
            "sampling are not those that are trained."
        ),
        fixes=(
            h.slower(),
            BACK,
        ),
        badness=newest.value / limit("repetitive"),
    )


F201 = Rule(
    code="F201",
    title="Entropy collapsed",
    why="A model that is certain of every token samples the same completion again and again; the rewards "
    "of a group then do not differ, and there is nothing to learn from.",
    check=entropy_collapse,
    streak=LASTING,
    when=f"the entropy is below {num('entropy_low')} nats and {pct('entropy_low_share')} of its start, and "
    "the run is no better",
)


F202 = Rule(
    code="F202",
    title="Entropy rose sharply",
    why="The model loses abilities: its completions become noise, and rewards drop as a result.",
    check=entropy_surge,
    streak=LASTING,
    when=f"the entropy is above {num('entropy_high')} nat and {num('entropy_high_share')} times its start; "
    f"if the run is better, above {limit('entropy_high') * limit('surge_of_better'):g} nats and "
    f"{limit('entropy_high_share') * limit('surge_of_better'):g} times its start",
)


F203 = Rule(
    code="F203",
    title="Completions grow without benefit",
    why="Longer completions need time and memory and are cut in the end; the reward shows no benefit of "
    "the length.",
    check=length_explosion,
    streak=LASTING,
    when=f"completions are longer than {num('length_long_share')} times their start and the run is no "
    f"better; if it is better, only where they grew so within {num('length_window')} rollouts and the "
    "reward may depend on the length",
)


F204 = Rule(
    code="F204",
    title="Completions become shorter",
    why="The model earns the format reward with short completions and stops working on the answer.",
    check=length_collapse,
    streak=LASTING,
    when=f"completions are shorter than {num('length_short_share')} of their start; if the run is better, "
    f"than {num('length_nothing_share')}",
)


F205 = Rule(
    code="F205",
    title="More and more completions are cut",
    why="A cut completion has no answer, so it is scored as wrong, and the model learns about the length "
    "limit instead of the task.",
    check=truncation_spiral,
    streak=LASTING,
    when=f"over {pct('truncated')} of the completions are cut, {100 * limit('truncated_rise'):g} points "
    "more than at the start",
)


F206 = Rule(
    code="F206",
    title="Completions repeat themselves",
    why="Completions that repeat the same text come from a model that broke down in training, or from an "
    "engine that samples with other weights than those being trained.",
    check=repetition,
    when=f"over {pct('repetitive')} of the completions, and {num('repetitive_least')} of them, repeat "
    "themselves",
)


F219 = Rule(
    code="F219",
    title="No completion ends before the limit",
    why="A completion that reaches the limit has no end to learn from and usually no answer to score.",
    check=truncated_from_the_start,
    streak=int(limit("truncated_at_start_values")),
    when=f"{pct('truncated_at_start')} of the completions are cut from the first rollout on",
)


F229 = Rule(
    code="F229",
    title="The model collapsed",
    why="A model that is certain of every token samples the same completion again and again. A model "
    "that has changed this much rarely recovers in later steps.",
    check=collapsed,
    when=f"F211 holds, and in {num('entropy_gone_values')} rollouts in a row, with no signal since, the "
    f"entropy was below {pct('entropy_gone_share')} of its start",
)
