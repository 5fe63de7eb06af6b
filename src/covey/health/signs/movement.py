"""Signs of numbers that do not move as they should: KL, gradients, rates, memory (F209 to F218)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from covey.health.history import History
from covey.health.names import NO_SPREAD
from covey.health.rule import Rule, num
from covey.health.saved import BACK
from covey.health.sign import Sign
from covey.health.signs.groups import has_no_signal
from covey.health.thresholds import limit
from covey.texts import joined, tr
from covey.types import Fix

_WATCHED = ("loss", "grad_norm", "reward", "kl", "entropy")


def kl_blow_up(h: History) -> Sign | None:
    """F209: the KL to the reference is very large, or was large within the first 20 steps and still is, or
    has grown a hundredfold in 20 values."""
    series = h.get("kl")
    if series is None:
        return None
    newest = series.last[-1].value
    before = series.last[-21].value if len(series.last) > 20 else None
    is_grown = (
        before is not None
        and newest > limit("kl_growth_least")
        and newest > limit("kl_growth") * max(before, 0.0)
    )
    # The policy is the reference at first: what is large after few updates was made by too large ones.
    early = sum(v.value > limit("kl_early") for v in series.first)
    is_fast = newest > limit("kl_early") and (not series.is_calibrated or early >= limit("kl_values"))
    if newest <= limit("kl_high") and not is_grown and not is_fast:
        return None
    since = tr(", {before:.3g} 20 values ago", before=before) if before is not None else ""
    if is_fast and not is_grown:
        since = tr(", {begin:.3g} at step {step}", begin=series.begin, step=series.first[0].step)
    beta = h.option("beta")
    edits = {"beta": float(f"{2 * beta:.2g}")} if beta else {}
    return Sign(
        seen=tr("KL to the reference is {newest:.3g} nats a token{since}", newest=newest, since=since),
        cause=tr("The updates are too large, or there are too many of them on one rollout."),
        fixes=(h.slower(), Fix(text=tr("use a larger beta, which pulls back more strongly"), edits=edits)),
        badness=newest / limit("kl_growth_least"),
    )


def gradient_blow_up(h: History) -> Sign | None:
    """F210: the norm of the gradient is many times its median."""
    series = h.get("grad_norm")
    if series is None or not series.start:
        return None
    newest = series.last[-1].value
    usual = max(series.start, median(series.last.numbers()))
    if newest <= limit("grad_growth") * usual:
        return None
    clipped = h.option("max_grad_norm")
    return Sign(
        seen=tr("gradient norm {newest:.3g}, the median is {usual:.3g}", newest=newest, usual=usual)
        + (tr(" (before clipping at {clipped:g})", clipped=clipped) if clipped else ""),
        cause=tr("The updates are too large, or the completions have become unlikely under the policy."),
        fixes=(h.slower(), Fix(text=tr("look at the completions of these steps in rollouts/"))),
        badness=newest / (limit("grad_growth") * usual),
    )


def rate_is_zero(h: History) -> Sign | None:
    """F213: the learning rate is 0, or was never more than next to nothing."""
    rate = h.value("learning_rate")
    # What falls below the bound after a rise is the end of a schedule.
    if rate is None or (rate != 0.0 and max(rate, h.highest_rate) > limit("learning_rate_zero")):
        return None
    asked = h.option("learning_rate")
    asked_for = tr("; the learning_rate option is {asked:g}", asked=asked) if asked else ""
    cause = tr("The warm-up is longer than the run, or the learning rate is far too small.")
    if rate == 0.0 and h.highest_rate > limit("learning_rate_zero"):
        cause = tr(
            "The schedule ended before the run: the run was resumed with more steps, or too few "
            "steps were planned."
        )
    rates = {"learning_rate": 1e-6}, {"warmup_ratio": 0.0, "warmup_steps": 0}
    return Sign(
        seen=tr("learning rate {rate:.3g}{asked_for}", rate=rate, asked_for=asked_for),
        cause=cause,
        fixes=(
            Fix(text=tr("use the default for full training (1e-5 for LoRA)"), edits=rates[0]),
            Fix(text=tr("use no warm-up"), edits=rates[1]),
        ),
        badness=1.0,
    )


def memory_grows(h: History) -> Sign | None:
    """F214: memory that grows in each quarter of a long window."""
    window = int(limit("memory_window"))
    for name in sorted(h.series):
        series = h.series[name]
        if not name.startswith("memory") or len(series.last) < window + int(limit("calibration_steps")):
            continue
        values = series.last.numbers(window)
        quarters = [median(values[i * window // 4 : (i + 1) * window // 4]) for i in range(4)]
        first, end = series.last[-window], series.last[-1]
        grown = end.value - first.value
        rises = all(b > a for a, b in pairwise(quarters))
        if (
            not rises
            or grown < limit("memory_growth_gib")
            or end.value < limit("memory_growth") * first.value
        ):
            continue
        rate = grown / (end.step - first.step) * 1000
        return Sign(
            seen=tr(
                "{name} was {before:.3g} at step {step} and is {now:.3g} at step {now_step}: "
                "{rate:.3g} GiB more per 1,000 steps",
                name=name,
                before=first.value,
                step=first.step,
                now=end.value,
                now_step=end.step,
                rate=rate,
            ),
            cause=tr("A reward function, a plugin or a tracker keeps data at every step."),
            fixes=(
                Fix(text=tr("check that reward functions keep no data between calls")),
                Fix(text=tr("stop from time to time and resume: --resume_from_checkpoint latest")),
            ),
            badness=end.value / (limit("memory_growth") * first.value),
        )
    return None


def dead_gradient(h: History) -> Sign | None:
    """F216: rewards differ within groups, and the gradient is exactly 0."""
    spread, share = h.value("reward_std"), h.value(NO_SPREAD)
    dropped = h.value("rows/dropped/zero_advantage") or 0.0
    # Of a rollout with some signal, the rows of one step may well have none.
    rows = h.record.metrics["rows/dropped/zero_advantage"].count if h.record and dropped else math.inf
    if h.value("grad_norm") != 0.0 or not spread or share == 1.0 or dropped >= rows:
        return None
    return Sign(
        seen=tr("reward_std {spread:.3g}", spread=spread)
        + ("" if share is None else tr(", {share:.0%} of the groups have a signal", share=1 - share))
        + tr(", but the gradient is exactly 0"),
        cause=tr(
            "The loss is not connected to the weights, or the optimizer gets no gradients; "
            "offloading, or gradient accumulation in some DeepSpeed versions, is known to cause "
            "this. The data is not the cause."
        ),
        fixes=(
            Fix(
                text=tr(
                    "switch off offloading of the model and the optimizer, and check whether the "
                    "gradient norm is above 0"
                )
            ),
            Fix(
                text=tr(
                    "try another version or stage of DeepSpeed, or compare with one process without DeepSpeed"
                )
            ),
        ),
        badness=1.0,
    )


def dead_kl(h: History) -> Sign | None:
    """F217: the KL to the reference stays exactly 0 while steps are taken."""
    if h.value("kl") != 0.0 or (h.value("learning_rate") or 0.0) <= 1e-12 or h.option("beta") == 0.0:
        return None
    if h.num_records < 2 or has_no_signal(h):
        return None
    return Sign(
        seen=tr("the KL is exactly 0, at a learning rate of {value:.3g}", value=h.value("learning_rate")),
        cause=tr(
            "The weights do not change: the optimizer has other tensors than the model, bfloat16 "
            "rounds the updates away, or the sampler never gets new weights."
        ),
        fixes=(
            Fix(text=tr("use float32 master weights, or LoRA with a float32 adapter")),
            Fix(
                text=tr(
                    "compare a weight of two checkpoints: if they are equal, the optimizer did not change it"
                )
            ),
        ),
        badness=1.0,
    )


def not_finite(h: History) -> Sign | None:
    """F218: a NaN or an infinity among the numbers that a run is judged by."""
    bad = [n for n in _WATCHED if (v := h.value(n)) is not None and not math.isfinite(v)]
    if not bad:
        return None
    return Sign(
        seen=joined(", ", [tr("{name} is {value}", name=name, value=h.value(name)) for name in bad]),
        cause=tr(
            "Possible causes: a division by 0 because every token of a batch is masked, an "
            "overflow, or weights that are not finite already."
        ),
        fixes=(
            BACK,
            h.slower(),
        ),
        badness=1.0,
    )


F209 = Rule(
    code="F209",
    title="KL grows without limit",
    why="The model moves away from its starting point faster than it can learn from its own samples, and "
    "often breaks down soon after.",
    check=kl_blow_up,
    streak=int(limit("kl_values")),
    each="step",
    when=f"the KL is above {num('kl_high')} nats a token; or it rose above {num('kl_early')} within the "
    f"first {num('calibration_steps')} steps and is still above it; or it is above "
    f"{num('kl_growth_least')} and {num('kl_growth')} times that of 20 steps ago",
)


F210 = Rule(
    code="F210",
    title="Gradient far above its median",
    why="Gradient clipping limits how far such a step moves the weights, but a few extreme completions "
    "decide in which direction.",
    check=gradient_blow_up,
    streak=int(limit("grad_values")),
    each="step",
    when=f"the norm of the gradient is {num('grad_growth')} times its median",
)


F213 = Rule(
    code="F213",
    title="Learning rate close to 0",
    why="The gradient is computed, but the weights do not change.",
    check=rate_is_zero,
    streak=int(limit("learning_rate_values")),
    each="step",
    when=f"the learning rate is 0, or was never above {num('learning_rate_zero')}",
)


F214 = Rule(
    code="F214",
    title="Memory grows",
    why="A run that needs more memory at every step will fail in the middle of a step.",
    check=memory_grows,
    each="step",
    when=f"memory grows in each quarter of {num('memory_window')} steps, to {num('memory_growth')} times "
    f"and by {num('memory_growth_gib')} GiB",
)


F216 = Rule(
    code="F216",
    title="Rewards differ and the gradient is 0",
    why="Different rewards within a group give advantages, and these give a gradient. A gradient of "
    "exactly 0 means that nothing reaches the weights, although loss and reward look normal.",
    check=dead_gradient,
    streak=int(limit("dead_gradient_values")),
    each="step",
    when="rewards differ within groups and the gradient is exactly 0",
)


F217 = Rule(
    code="F217",
    title="KL stays exactly 0",
    why="A model in training moves away from its starting point. A KL divergence of exactly 0 means that "
    "it has not changed.",
    check=dead_kl,
    streak=int(limit("dead_kl_values")),
    each="step",
    when="the KL is exactly 0 while steps are taken",
)


F218 = Rule(
    code="F218",
    title="NaN in the log",
    why="A NaN in weights or optimizer state stays there; everything logged after it has no meaning.",
    check=not_finite,
    each="step",
    when="a loss, gradient, reward, KL or entropy is not finite",
)
