"""Rules on the signal of groups: rewards that do not differ within them, or are not there, teach nothing
(F211, F212, F228)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from covey.health.baseline import fallen, is_better, is_solved, total_of
from covey.health.history import History, Value, binary_means, chance_of_no_spread
from covey.health.names import CUT, ENTROPY, IDENTICAL, INVALID, NO_SPREAD, UNPARSED
from covey.health.rule import Rule, num, pct
from covey.health.sign import Sign
from covey.health.signs.unearned import never_earned, unearned_now
from covey.health.thresholds import limit
from covey.texts import counted, joined, tr
from covey.types import Fix


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
    flat = _without_signal(h)
    groups = sum(v.count for v in flat)
    is_small = groups < limit("no_signal_groups") and len(flat) < limit("no_signal_rollouts_small")
    if is_small or len(flat) < limit("no_signal_rollouts"):
        return None
    reward = h.value("reward")
    at = "" if reward is None else tr("; the reward is {reward:.4g}", reward=reward)
    return Sign(
        seen=tr(
            "in {num_flat} rollouts in a row all completions of each prompt got the same reward{at}",
            num_flat=len(flat),
            at=at,
        ),
        cause=why_equal(h),
        fixes=_fixes_of_equal(h),
        badness=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyGone:
    """The entropy of the first rollout, and the mean of the three in a row that are lowest among the newest
    rollouts without a signal."""

    begin: float
    now: float


def entropy_gone(h: History) -> EntropyGone | None:
    """The entropy where it is less than a tenth of what it was, or was at a time after which no rollout had a
    signal, and the run is no better for it: nor is one whose other rewards rise while no right answer is
    earned."""
    series = h.get(*ENTROPY)
    if series is None or (is_better(h) and not unearned_now(h)):
        return None
    size, flat = int(limit("entropy_gone_values")), _without_signal(h)
    since = [v.value for v in series.last if flat and v.step >= flat[-1].step]
    now = min(
        (fmean(since[i : i + size]) for i in range(len(since) - size + 1)),
        default=fmean(series.last.numbers(size)),
    )
    return (
        EntropyGone(begin=series.begin, now=now) if now < limit("entropy_gone_share") * series.begin else None
    )


def lost_answers(h: History) -> str:
    """The share of completions without a readable answer, in words, where it was small in the first rollout
    and is most of them now: the updates did that, and no parser."""
    series = h.get(UNPARSED)
    if (
        series is None
        or series.begin > limit("unparsed_begin")
        or series.last[-1].value < limit("unparsed_lost")
    ):
        return ""
    return tr(
        "Completions without a readable answer: {begin:.0%} in the first rollout, {now:.0%} now.",
        begin=series.begin,
        now=series.last[-1].value,
    )


def too_large(h: History) -> str:
    """The cause of a collapse, with the learning rate where it is known."""
    rate = h.option("learning_rate") or h.highest_rate
    if not rate:
        return tr("The updates are too large: the learning rate is too high for this model and batch.")
    return tr(
        "The updates are too large: the learning rate, {rate:g}, is too high for this model and batch.",
        rate=rate,
    )


def slower(h: History) -> Fix:
    """Propose a lower learning rate: a tenth if neither signal nor entropy is left, else a third."""
    return h.slower(by=10 if has_no_signal(h) and entropy_gone(h) else 3)


def _fixes_of_equal(h: History) -> tuple[Fix, ...]:
    if entropy_gone(h) is not None or lost_answers(h):
        return (h.slower(by=10),)
    if fallen(h, total_of(h)) is not None:
        return h.slower(), other_prompts()
    return (_test_the_reward(),) if _is_constant(h) else (other_prompts(), h.larger_groups())


def _is_constant(h: History) -> bool:
    """Whether the reward has the same value, not 0, in every rollout so far."""
    series = h.get(h.sampled("reward"))
    values = {v.value for v in series.first} | set(series.last.numbers()) if series is not None else set()
    return len(values) == 1 and values != {0.0}


def other_prompts() -> Fix:
    """Other prompts, as a way out."""
    return Fix(text=tr("use prompts that the model solves sometimes"))


def _test_the_reward() -> Fix:
    return Fix(text=tr("call the reward with a right and a wrong completion: the scores must differ"))


def _without_signal(h: History) -> list[Value]:
    """The newest rollouts, newest first, as far back as none has a group with any spread."""
    series = h.get(NO_SPREAD, "reward_std")
    if series is None:
        return []
    value = 1.0 if h.value(NO_SPREAD) is not None else 0.0
    found = []
    for item in reversed(series.last):
        if item.value != value:
            break
        found.append(item)
    return found


def why_equal(h: History) -> str:
    """The likely cause of equal rewards within groups."""
    if entropy_gone(h) is not None:
        return too_large(h)
    if lost := lost_answers(h):
        return joined(" ", [lost, too_large(h)])
    change = fallen(h, total_of(h))
    if change is not None:
        return tr(
            "The reward fell: {words}. The completions now contain no right answer to learn from.",
            words=change.words,
        )
    unparsed, cut = h.value(UNPARSED), h.value(CUT)
    reward, series = h.value(h.sampled("reward")), h.get(h.sampled("reward"))
    if (h.value(IDENTICAL) or 0.0) > limit("identical_groups"):
        return tr("The completions of a prompt are the same text: sampling is greedy or has a fixed seed.")
    if unparsed is not None and unparsed > 0.5:
        return tr(
            "No answer can be parsed in {unparsed:.0%} of the completions: the answer format or "
            "the parser is wrong.",
            unparsed=unparsed,
        )
    if cut is not None and cut > 0.5:
        return tr("{cut:.0%} of the completions are truncated before they end.", cut=cut)
    if stuck := never_earned(h):
        return tr(
            "No completion so far has earned {names}: the prompts may be too hard, or the reward may not "
            "find what it looks for.",
            names=", ".join(name for name, _ in stuck),
        )
    if _is_constant(h):
        return tr(
            "Every completion of the run has the reward {reward:.4g}: the reward may not depend on "
            "the completion.",
            reward=reward,
        )
    if reward is not None and series is not None:
        highest = max(series.last.numbers())
        lowest = min(*series.last.numbers(), *(v.value for v in series.first))
        if reward >= highest and lowest < highest:
            return tr("The prompts are solved: the reward is at its highest in this run.")
        if reward == 0:
            return tr(
                "The prompts are too hard, the reward does not find what it looks for, or it is a penalty "
                "that no completion gets."
            )
    return tr("The prompts are too easy or too hard, or the reward does not depend on the completion.")


def little_signal(h: History) -> Sign | None:
    """F212: far more groups without spread than chance gives, or the same completions within groups."""
    same = h.series.get(IDENTICAL)
    value = h.value(IDENTICAL)
    early = same is not None and len(same.last) <= limit("identical_rollouts")
    is_some = (
        same is not None and value is not None and value * same.last[-1].count >= limit("repetitive_least")
    )
    if early and is_some and value is not None and value > limit("identical_groups"):
        sample = Fix(text="sample", edits={"temperature": 1.0})
        return Sign(
            seen=tr("in {value:.0%} of the groups all completions are the same text", value=value),
            cause=tr("Sampling is greedy, or every completion gets the same seed."),
            fixes=(other_prompts() if (h.option("temperature") or 0.0) >= 1.0 else sample,),
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
        seen=tr(
            "in {share:.0%} of the groups of {window} rollouts all rewards are equal; at a pass "
            "rate of {rate:.0%} and {size:g} completions per prompt, {expected:.0%} is expected by "
            "chance",
            share=share,
            window=window,
            rate=rate,
            size=size,
            expected=expected,
        ),
        cause=tr("Some prompts are always or never solved, or the completions of a prompt are the same."),
        fixes=(
            Fix(text=tr("leave out prompts that are always or never solved")),
            Fix(
                text=tr(
                    "compare the completions of one prompt in rollouts/: if they are the same text, "
                    "sampling is wrong"
                )
            ),
        ),
        badness=share / limit("little_signal"),
    )


def unscored(h: History) -> Sign | None:
    """F228: many completions have no reward at all."""
    series = h.get(INVALID)
    if series is None:
        return None
    newest = [series.last[-i] for i in range(1, 1 + min(int(limit("recent_values")), len(series.last)))]
    lost, num = sum(v.value for v in newest), sum(v.count for v in newest)
    if lost < limit("unscored_least") or lost <= limit("unscored") * num:
        return None
    return Sign(
        seen=tr(
            "{lost:.0f} of {num} completions of {rollouts} ({share:.0%}) have no reward",
            lost=lost,
            num=num,
            rollouts=counted(len(newest), "rollout"),
            share=lost / num,
        ),
        cause=tr("Every reward returned None for them, or failed on them."),
        fixes=(
            Fix(text=tr("return a number for each completion that the reward applies to")),
            Fix(text=tr("leave out rows of the data that no reward applies to, or add a reward for them")),
        ),
        badness=lost / num / limit("unscored"),
    )


F211 = Rule(
    code="F211",
    title="No group has a signal",
    why="If all completions of a prompt have the same reward, their advantages are 0 and the model learns "
    "nothing.",
    check=no_signal,
    when=f"no group has any spread: {num('no_signal_rollouts')} rollouts and {num('no_signal_groups')} "
    f"groups, or {num('no_signal_rollouts_small')} rollouts; not where the task is solved",
)


F212 = Rule(
    code="F212",
    title="Few groups have a signal",
    why="A group whose completions all have the same reward teaches the model nothing, but sampling it takes "
    "as long as any other group.",
    check=little_signal,
    when=f"{pct('little_signal')} of the groups of {num('little_signal_rollouts')} rollouts have no "
    f"spread, {100 * limit('little_signal_excess'):g} points more than p^G + (1-p)^G; or the completions "
    "of a prompt are the same text from the start",
)


F228 = Rule(
    code="F228",
    title="Completions without a reward",
    why="They are left out of their groups. The time spent on sampling them is lost, and the step learns "
    "from fewer completions than planned.",
    check=unscored,
    when=f"over {pct('unscored')} of the completions of {num('recent_values')} rollouts, and "
    f"{num('unscored_least')} of them, have no reward",
)
