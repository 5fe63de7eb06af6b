"""Signs of numbers that do not move as they should: KL, gradients, rates, memory (F209 to F219)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median, stdev

from covey.health.baseline import is_solved
from covey.health.groups import has_no_signal, other_prompts, why_equal
from covey.health.history import History
from covey.health.names import NO_SPREAD
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
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
        cause=tr("Steps that are too large, or too many of them on one rollout."),
        fixes=(h.slower(), Fix(text=tr("a stronger pull back: a larger beta"), edits=edits)),
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
        cause=tr("Steps that are too large, or completions that the model no longer thinks likely."),
        fixes=(h.slower(), Fix(text=tr("see in rollouts/ what the completions of these steps look like"))),
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
    cause = tr("A warm-up that is longer than the run, or a learning rate that is far too small.")
    if rate == 0.0 and h.highest_rate > limit("learning_rate_zero"):
        cause = tr(
            "The schedule has ended before the run: a resume with more steps, or too few planned ones."
        )
    rates = {"learning_rate": 1e-6}, {"warmup_ratio": 0.0, "warmup_steps": 0}
    return Sign(
        seen=tr("learning rate {rate:.3g}{asked_for}", rate=rate, asked_for=asked_for),
        cause=cause,
        fixes=(
            Fix(text=tr("the default for all weights (1e-5 for LoRA)"), edits=rates[0]),
            Fix(text=tr("no warm-up"), edits=rates[1]),
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
                "{name} {value:.3g} at step {step}, {value2:.3g} at step {step2}: {rate:.3g} "
                "GiB in 1,000 steps",
                name=name,
                value=first.value,
                step=first.step,
                value2=end.value,
                step2=end.step,
                rate=rate,
            ),
            cause=tr("Something is kept at every step: by a reward function, a plugin, or a tracker."),
            fixes=(
                Fix(text=tr("see that reward functions keep nothing between calls")),
                Fix(text=tr("stop now and then and go on: --resume_from_checkpoint latest")),
            ),
            badness=end.value / (limit("memory_growth") * first.value),
        )
    return None


def stopped_learning(h: History) -> Sign | None:
    """F215: over a long window the reward does not move, and next to no step had anything to learn from."""
    reward = h.get("reward")
    if reward is None or is_solved(h):
        return None
    stride = reward.last[-1].step - reward.last[-2].step if len(reward.last) > 1 else 1
    window = int(limit("stopped_window" if stride == 1 else "stopped_window_log"))
    if len(reward.last) < window:
        return None
    values = reward.last.numbers(window)
    half = window // 2
    noise = max(stdev(values), 1e-12)
    if abs(fmean(values[half:]) - fmean(values[:half])) > 2 * noise / math.sqrt(half):
        return None
    idle, share = _idle(h, window)
    if share < limit("stopped_share"):
        return None
    return Sign(
        seen=tr(
            "over {window} values the reward stays at {fmean:.4g}; in {share:.0%} of them {idle}",
            window=window,
            fmean=fmean(values),
            share=share,
            idle=idle,
        ),
        cause=why_equal(h),
        fixes=(
            Fix(text=tr("end the run here if this reward is enough")),
            other_prompts(),
        ),
        badness=1.0,
    )


def _idle(h: History, window: int) -> tuple[str, float]:
    """Of the ways to learn nothing the most frequent one of the window, and its share."""
    ways = (
        (tr("no group has any spread"), NO_SPREAD, 1.0),
        (tr("the spread within groups is 0"), "reward_std", 0.0),
        (tr("the gradient is 0"), "grad_norm", 0.0),
        (tr("no weight moves"), "update_ratio", 0.0),
    )
    found = []
    for words, name, value in ways if h.compares_siblings else ways[2:]:
        last = h.series[name].last.numbers(window) if name in h.series else ()
        if len(last) == window:
            found.append((sum(v == value for v in last) / window, words))
    share, words = max(found, default=(0.0, ""))
    return words, share


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
        + ("" if share is None else tr(", {share:.0%} of the groups carry signal", share=1 - share))
        + tr(", and the gradient is exactly 0"),
        cause=tr(
            "The loss is cut off from the weights, or the optimizer holds no gradients: "
            "offloading, or the accumulation of a DeepSpeed version, is known for it. The data "
            "are not at fault."
        ),
        fixes=(
            Fix(
                text=tr(
                    "switch off offloading of the model and the optimizer, and see if the norm is above 0"
                )
            ),
            Fix(text=tr("another version or stage of DeepSpeed; or one process without it, to compare")),
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
            "The weights do not move: an optimizer that holds other tensors than the model, "
            "updates that bfloat16 rounds away, or a sampler that never gets new weights."
        ),
        fixes=(
            Fix(text=tr("float32 master weights, or LoRA with a float32 adapter")),
            Fix(text=tr("compare a weight of two checkpoints: equal ones say that nothing was stepped")),
        ),
        badness=1.0,
    )


def not_finite(h: History) -> Sign | None:
    """F218: a NaN or an infinity among the numbers that a run is judged by."""
    bad = [n for n in _WATCHED if (v := h.value(n)) is not None and not math.isfinite(v)]
    if not bad:
        return None
    return Sign(
        seen=", ".join(tr("{name} is {value}", name=name, value=h.value(name)) for name in bad),
        cause=tr(
            "A division by 0 where every token of a batch is masked, an overflow, or weights "
            "that are gone already."
        ),
        fixes=(
            Fix(text=tr("resume from a checkpoint before this step: --resume_from_checkpoint DIR")),
            h.slower(),
        ),
        badness=1.0,
    )
