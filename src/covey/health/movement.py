"""Signs of numbers that do not move as they should: KL, gradients, signal, rates, memory (F209 to F220)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median, stdev

from covey.health.baseline import fallen, is_solved, total_of
from covey.health.history import History, Series, Value, binary_means, chance_of_no_spread
from covey.health.names import CUT, IDENTICAL, NO_SPREAD, UNPARSED
from covey.health.sign import Sign
from covey.health.thresholds import limit
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
    since = f", {before:.3g} 20 values ago" if before is not None else ""
    if is_fast and not is_grown:
        since = f", {series.begin:.3g} at step {series.first[0].step}"
    beta = h.option("beta")
    edits = {"beta": float(f"{2 * beta:.2g}")} if beta else {}
    return Sign(
        seen=f"KL to the reference is {newest:.3g} nats a token{since}",
        cause="Steps that are too large, or too many of them on one rollout.",
        fixes=(h.slower(), Fix(text="a stronger pull back: a larger beta", edits=edits)),
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
        seen=f"gradient norm {newest:.3g}, the median is {usual:.3g}"
        + (f" (before clipping at {clipped:g})" if clipped else ""),
        cause="Steps that are too large, or completions that the model no longer thinks likely.",
        fixes=(h.slower(), Fix(text="see in rollouts/ what the completions of these steps look like")),
        badness=newest / (limit("grad_growth") * usual),
    )


def has_no_signal(h: History) -> bool:
    """Whether no group of the newest rollout has any spread."""
    share, spread = h.value(NO_SPREAD), h.value("reward_std")
    if not h.compares_siblings:
        return False
    return share == 1.0 if share is not None else spread == 0.0


def no_signal(h: History) -> Sign | None:
    """F211: no group of several rollouts in a row has any spread, and the run has not solved its prompts."""
    if not has_no_signal(h) or is_solved(h):
        return None
    series = h.get(NO_SPREAD, "reward_std")
    assert series is not None
    flat = _tail(series, 1.0 if h.value(NO_SPREAD) is not None else 0.0)
    groups = sum(v.count for v in flat)
    is_small = groups < limit("no_signal_groups") and len(flat) < limit("no_signal_rollouts_small")
    if is_small or len(flat) < limit("no_signal_rollouts"):
        return None
    reward = h.value("reward")
    at = "" if reward is None else f"; the reward is {reward:.4g}"
    return Sign(
        seen=f"in {len(flat)} rollouts in a row every completion has the reward of its siblings{at}",
        cause=_why_equal(h),
        fixes=_fixes_of_equal(h),
        badness=1.0,
    )


def _fixes_of_equal(h: History) -> tuple[Fix, ...]:
    if fallen(h, total_of(h)) is not None:
        return h.slower(), _other_prompts()
    return (_test_the_reward(),) if _is_constant(h) else (_other_prompts(), h.larger_groups())


def _is_constant(h: History) -> bool:
    """Whether the reward has the same value, not 0, in every rollout so far."""
    series = h.get(h.sampled("reward"))
    values = {v.value for v in series.first} | set(series.last.numbers()) if series is not None else set()
    return len(values) == 1 and values != {0.0}


def _other_prompts() -> Fix:
    return Fix(text="prompts that the model solves sometimes")


def _test_the_reward() -> Fix:
    return Fix(text="call the reward with a right and a wrong completion: it has to tell them apart")


def _tail(series: Series, value: float) -> list[Value]:
    """The newest values, as far back as they are all `value`."""
    found = []
    for item in reversed(series.last):
        if item.value != value:
            break
        found.append(item)
    return found


def _why_equal(h: History) -> str:
    change = fallen(h, total_of(h))
    if change is not None:
        return f"The reward fell: {change.words}. What is left has no right answer to learn from."
    unparsed, cut = h.value(UNPARSED), h.value(CUT)
    reward, series = h.value(h.sampled("reward")), h.get(h.sampled("reward"))
    if (h.value(IDENTICAL) or 0.0) > limit("identical_groups"):
        return "The completions of a prompt are the same text: sampling is greedy or has a fixed seed."
    if unparsed is not None and unparsed > 0.5:
        return f"No answer can be read in {unparsed:.0%} of the completions: the form, or the parser."
    if cut is not None and cut > 0.5:
        return f"{cut:.0%} of the completions are cut before they end."
    if _is_constant(h):
        return f"Every completion of the run has the reward {reward:.4g}: it does not look at them."
    if reward is not None and series is not None:
        highest = max(series.last.numbers())
        if reward > 0 and reward >= highest and min(series.last.numbers()) < highest:
            return "The prompts are solved: the reward is the highest of the run."
        if reward == 0:
            return "The prompts are too hard, or the reward does not find what it pays for."
    return "The prompts are too easy or too hard, or the reward does not look at the completion."


def little_signal(h: History) -> Sign | None:
    """F212: far more groups without spread than chance gives, or the same completions within groups."""
    same = h.series.get(IDENTICAL)
    value = h.value(IDENTICAL)
    early = same is not None and len(same.last) <= limit("identical_rollouts")
    is_some = (
        same is not None and value is not None and value * same.last[-1].count >= limit("repetitive_least")
    )
    if early and is_some and value is not None and value > limit("identical_groups"):
        return Sign(
            seen=f"in {value:.0%} of the groups all completions are the same text",
            cause="Sampling is greedy, or every completion gets the same seed.",
            fixes=(Fix(text="sample", edits={"temperature": 1.0}),),
            badness=1.0,
        )
    series, size = h.get(h.sampled(NO_SPREAD)), h.option("num_generations")
    window = int(limit("little_signal_rollouts"))
    if series is None or not size or len(series.last) < window or has_no_signal(h):
        return None
    if not h.compares_siblings:
        return None
    if h.has_risen():  # prompts that the run has come to solve
        return None
    share = fmean(series.last.numbers(window))
    rates = binary_means(h)
    groups = sum(series.last[-i].count for i in range(1, window + 1))
    if not rates or share <= limit("little_signal") or groups < limit("no_signal_groups"):
        return None
    expected, rate = min((chance_of_no_spread(p, size), p) for p in rates)
    if share - expected <= limit("little_signal_excess"):
        return None
    return Sign(
        seen=f"{share:.0%} of the groups of {window} rollouts have no spread; at a pass rate of {rate:.0%} "
        f"and {size:g} completions a prompt chance gives {expected:.0%}",
        cause="Prompts that are always solved or never, or completions of a prompt that are the same.",
        fixes=(
            Fix(text="leave out prompts that are always or never solved"),
            Fix(text="look at siblings in rollouts/: the same text means that sampling is at fault"),
        ),
        badness=share / limit("little_signal"),
    )


def short_of_signal(h: History) -> Sign | None:
    """F220: groups without signal are left, after every further draw and what was held of earlier
    rollouts."""
    left, tried = h.value("select/without_signal"), h.value("select/attempts")
    if not left or not tried or h.record is None:
        return None
    replayed, groups = h.value("select/replayed") or 0.0, h.record.metrics["select/replayed"].count
    fixes = [_other_prompts(), h.larger_groups()]
    times = h.option("max_resample_times")
    if times and tried >= times:
        text = "more draws, each of which takes as long as it samples"
        fixes.append(Fix(text=text, edits={"max_resample_times": int(2 * times)}))
    return Sign(
        seen=f"{left:.0f} of {groups} groups have no signal after {tried:.0f} further draws and "
        f"{replayed:.0f} replayed groups, and stay",
        cause="Many prompts are always solved or never, or the reward has few values.",
        fixes=tuple(fixes),
        badness=left / groups,
    )


def rate_is_zero(h: History) -> Sign | None:
    """F213: the learning rate is 0, or was never more than next to nothing."""
    rate = h.value("learning_rate")
    # What falls below the bound after a rise is the end of a schedule.
    if rate is None or (rate != 0.0 and max(rate, h.highest_rate) > limit("learning_rate_zero")):
        return None
    asked = h.option("learning_rate")
    asked_for = f"; {asked:g} was asked for" if asked else ""
    cause = "A warm-up that is longer than the run, or a learning rate that is far too small."
    if rate == 0.0 and h.highest_rate > limit("learning_rate_zero"):
        cause = "The schedule has ended before the run: a resume with more steps, or too few planned ones."
    rates = {"learning_rate": 1e-6}, {"warmup_ratio": 0.0, "warmup_steps": 0}
    return Sign(
        seen=f"learning rate {rate:.3g}{asked_for}",
        cause=cause,
        fixes=(
            Fix(text="the default for all weights (1e-5 for LoRA)", edits=rates[0]),
            Fix(text="no warm-up", edits=rates[1]),
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
            seen=f"{name} {first.value:.3g} at step {first.step}, {end.value:.3g} at step {end.step}: "
            f"{rate:.3g} GiB in 1,000 steps",
            cause="Something is kept at every step: by a reward function, a plugin, or a tracker.",
            fixes=(
                Fix(text="see that reward functions keep nothing between calls"),
                Fix(text="stop now and then and go on: --resume_from_checkpoint latest"),
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
        seen=f"over {window} values the reward stays at {fmean(values):.4g}; in {share:.0%} of them {idle}",
        cause=_why_equal(h),
        fixes=(
            Fix(text="end the run here if this reward is enough"),
            _other_prompts(),
        ),
        badness=1.0,
    )


def _idle(h: History, window: int) -> tuple[str, float]:
    """Of the ways to learn nothing the most frequent one of the window, and its share."""
    ways = (
        ("no group has any spread", NO_SPREAD, 1.0),
        ("the spread within groups is 0", "reward_std", 0.0),
        ("the gradient is 0", "grad_norm", 0.0),
        ("no weight moves", "update_ratio", 0.0),
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
        seen=f"reward_std {spread:.3g}"
        + ("" if share is None else f", {1 - share:.0%} of the groups carry signal")
        + ", and the gradient is exactly 0",
        cause="The loss is cut off from the weights, or the optimizer holds no gradients: offloading, or the "
        "accumulation of a DeepSpeed version, is known for it. The data are not at fault.",
        fixes=(
            Fix(text="switch off offloading of the model and the optimizer, and see if the norm is above 0"),
            Fix(text="another version or stage of DeepSpeed; or one process without it, to compare"),
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
        seen=f"the KL is exactly 0, at a learning rate of {h.value('learning_rate'):.3g}",
        cause="The weights do not move: an optimizer that holds other tensors than the model, updates that "
        "bfloat16 rounds away, or a sampler that never gets new weights.",
        fixes=(
            Fix(text="float32 master weights, or LoRA with a float32 adapter"),
            Fix(text="compare a weight of two checkpoints: equal ones say that nothing was stepped"),
        ),
        badness=1.0,
    )


def not_finite(h: History) -> Sign | None:
    """F218: a NaN or an infinity among the numbers that a run is judged by."""
    bad = [n for n in _WATCHED if (v := h.value(n)) is not None and not math.isfinite(v)]
    if not bad:
        return None
    return Sign(
        seen=", ".join(f"{name} is {h.value(name)}" for name in bad),
        cause="A division by 0 where every token of a batch is masked, an overflow, or weights that are gone "
        "already.",
        fixes=(
            Fix(text="resume from a checkpoint before this step: --resume_from_checkpoint DIR"),
            h.slower(),
        ),
        badness=1.0,
    )
