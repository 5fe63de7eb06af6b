"""Signs that a run makes its model worse, or something else than was wanted: F207, F208, F221 to F224."""

from __future__ import annotations

from statistics import fmean, median

from covey.health.baseline import (
    Change,
    fallen,
    fallen_parts,
    held_out_error,
    held_out_fall,
    held_out_size,
    is_better,
    risen_parts,
    total_of,
)
from covey.health.history import History, Series
from covey.health.names import CUT, ENTROPY, LENGTH, MOST_COMMON, PAID_LENGTH, REPETITIVE, UNPARSED
from covey.health.rule import LASTING, Rule, num, pct
from covey.health.saved import BACK
from covey.health.sign import Sign
from covey.health.signs.groups import slower, too_large
from covey.health.thresholds import limit
from covey.texts import joined, tr
from covey.texts.numbers import told
from covey.types import Fix


def breakdown(h: History) -> Sign | None:
    """F221: the reward, or a part of it that nothing makes up for, is far below its start or its best, and
    the completions are not what they were."""
    found, other = _largest_fall(h), other_completions(h)
    if found is None or not other:
        return None
    name, change = found
    return Sign(
        seen=tr("{name} {words}; {other}", name=name, words=change.words, other=joined(", ", other)),
        cause=too_large(h),
        fixes=(slower(h), BACK),
        badness=change.badness,
        was_well=last_well(h, change),
    )


def fell(h: History) -> Sign | None:
    """F222: the reward, or the held-out one, is far below its start or its best, and completions look as
    before."""
    found, held_out = _largest_fall(h), held_out_fall(h)
    if found is not None and other_completions(h):
        return None
    seen, badness, was_well = [], 1.0, None
    if found is not None and found[1].badness >= limit("fell_badness"):
        name, change = found
        seen.append(tr("{name} {words}", name=name, words=change.words))
        badness, was_well = change.badness, last_well(h, change)
    # Where the training reward rises, this is F208's.
    total = h.series.get(total_of(h))
    if held_out is not None and (total is None or total.now <= total.begin):
        best, newest = held_out
        was_well = was_well or best.step + 1
        best_word, newest_word = told(best.value, newest.value, digits=3)
        seen.append(
            tr(
                "held-out reward {best} at step {best_step} -> {newest} at step {newest_step}",
                best=best_word,
                best_step=best.step,
                newest=newest_word,
                newest_step=newest.step,
            )
        )
    if not seen:
        return None
    return Sign(
        seen=joined("; ", seen),
        cause=tr(
            "The learning rate is too high, the reward changed during the run, or the prompts "
            "of these steps are harder."
        ),
        fixes=(h.slower(), BACK),
        badness=badness,
        was_well=was_well,
    )


def _largest_fall(h: History) -> tuple[str, Change] | None:
    """The fall of the total reward; else that of a part, where no other part has risen."""
    total = fallen(h, total_of(h))
    if total is not None:
        return "reward", total
    parts = fallen_parts(h)
    return parts[0] if parts and not risen_parts(h) else None


def hacking(h: History) -> Sign | None:
    """F207: one reward has risen while another has fallen, and the total has not."""
    if fallen(h, total_of(h)) is not None:
        return None
    up, down = risen_parts(h), fallen_parts(h)
    if not up or not down:
        return None
    (up_name, rise), (down_name, fall) = up[0], down[0]
    return Sign(
        seen=tr(
            "{up_name} rose ({rise}), while {down_name} fell ({fall})",
            up_name=up_name,
            rise=rise.words,
            down_name=down_name,
            fall=fall.words,
        ),
        cause=tr(
            "One reward can be earned without the other, and the easier one is learned at the expense "
            "of the other."
        ),
        fixes=(
            Fix(text=tr("a smaller weight for the one that rises: --reward_weights")),
            Fix(text=tr("give this reward only to completions that also earn the other one")),
        ),
        badness=min(rise.badness, fall.badness),
    )


def held_out_falls(h: History) -> Sign | None:
    """F208: three evaluations in a row are clearly below the best one, and the training reward is above."""
    series, reward = h.get("eval_reward"), h.get(h.sampled("reward"))
    num_newest = int(limit("eval_fall_values"))
    if series is None or reward is None or series.last[-1].step != h.step or len(series.last) <= num_newest:
        return None
    values = list(series.last)
    best = max(values[:-num_newest], key=lambda v: v.value)
    highest = max(values[-num_newest:], key=lambda v: v.value)
    share = limit("eval_fall_share") * held_out_size(h, best.value)
    bound = max(share, limit("eval_fall_errors") * held_out_error(h, highest))
    then = [v.value for v in reward.last if v.step <= best.step][-int(limit("recent_values")) :]
    # An evaluation before the first step has no rollout before it.
    then = then or [reward.begin]
    if best.value - highest.value <= bound or reward.now <= fmean(then):
        return None
    best_word, highest_word = told(best.value, highest.value, digits=3)
    before_word, now_word = told(fmean(then), reward.now, digits=3)
    return Sign(
        seen=tr(
            "held-out reward {best} at step {step}, but at most {highest} in the last "
            "{num_newest} evaluations; training reward {before} -> {now}",
            best=best_word,
            step=best.step,
            highest=highest_word,
            num_newest=num_newest,
            before=before_word,
            now=now_word,
        ),
        cause=tr("The model overfits to the training prompts or to their reward."),
        fixes=(
            _best(h, best.step),
            Fix(text=tr("use more prompts, or more varied ones")),
        ),
        badness=(best.value - highest.value) / bound,
    )


def _best(h: History, step: int) -> Fix:
    """The checkpoint of an evaluation, where it was saved."""
    path = next((s.path for s in h.saved() if s.step == step), None)
    if path is not None:
        return Fix(text=tr("use {path}, the checkpoint of the best evaluation", path=path))
    return Fix(
        text=tr(
            "--load_best_model_at_end true keeps the checkpoint of the best evaluation, and "
            "--early_stopping_patience ends a run whose evaluations no longer improve"
        )
    )


def last_well(h: History, change: Change) -> int | None:
    """The last step whose rollout was nearer to the reward before a fall than to that after it."""
    series, middle = h.series.get(change.name), (change.before + change.now) / 2
    values = [] if series is None else [*series.first, *series.last]
    return max((v.step for v in values if (v.value > middle) == (change.before > middle)), default=None)


def length_is_paid(h: History) -> Sign | None:
    """F223: within groups the reward follows the length of completions, and that has moved as it pays."""
    length, paid = h.series.get(LENGTH), h.series.get(PAID_LENGTH)
    if length is None or paid is None or not h.has_risen():
        return None
    share = length.now / max(length.begin, 1e-9)
    way = 1.0 if share > 1 else -1.0
    moved = share / limit("length_paid_share") if way > 0 else limit("length_short_share") / max(share, 1e-9)
    if moved < 1:
        return None
    # Once all completions are as long as they may be, nothing is left to correlate.
    correlation = max(_weighted(paid, way, is_first) for is_first in (True, False))
    if correlation < limit("length_correlation"):
        return None
    if is_better(h) and len(risen_parts(h)) > 1:
        return None  # something else than length was learned, too
    total = h.series[total_of(h)]
    reward_begin, reward_now = told(total.begin, total.now)
    return Sign(
        seen=tr(
            "mean length {begin:.4g} -> {now:.4g} tokens, reward {reward_begin} -> "
            "{reward_now}; the correlation of length and reward within groups is {way:.2f}",
            begin=length.begin,
            now=length.now,
            reward_begin=reward_begin,
            reward_now=reward_now,
            way=way * correlation,
        ),
        cause=tr("The reward pays for long completions, whatever they say.")
        if way > 0
        else tr("The reward pays for short completions, whatever they say."),
        fixes=(
            Fix(text=tr("limit what length can earn, or reward length only if the answer is right")),
            Fix(text=tr("a smaller weight for the reward that follows the length: --reward_weights")),
        ),
        badness=moved,
    )


def one_answer(h: History) -> Sign | None:
    """F224: different prompts get the same completion, which at the start they did not."""
    same = h.get(MOST_COMMON)
    if same is None or same.begin >= limit("one_answer_start") or same.now < limit("one_answer"):
        return None
    return Sign(
        seen=tr(
            "{now:.0%} of the completions of different prompts are the same text ({begin:.0%} at the start)",
            now=same.now,
            begin=same.begin,
        ),
        cause=tr("The reward pays for the same text whatever the prompt is, or the updates are too large."),
        fixes=(
            Fix(
                text=tr("call the reward with that completion and another prompt: it must give another score")
            ),
            h.slower(),
        ),
        badness=same.now / limit("one_answer"),
    )


def other_completions(h: History) -> list[str]:
    """What completions are now that they were not at the first rollout, each with both numbers."""
    found = []
    kl = h.series.get("kl")
    if kl is not None and (now := median(kl.last.numbers(3))) > limit("kl_growth_least"):
        found.append(tr("KL {now:.3g} nats a token", now=now))
    entropy = next((h.series[n] for n in ENTROPY if n in h.series), None)
    if entropy is not None:
        high, low = limit("entropy_high_share"), limit("entropy_low_share")
        if not low * entropy.begin <= entropy.now <= high * entropy.begin:
            found.append(
                tr("entropy {begin:.3g} -> {now:.3g} nats a token", begin=entropy.begin, now=entropy.now)
            )
    length = h.series.get(LENGTH)
    if length is not None:
        share, bound = length.now / max(length.begin, 1e-9), limit("length_paid_share")
        if not 1 / bound <= share <= bound:
            found.append(
                tr("mean length {begin:.4g} -> {now:.4g} tokens", begin=length.begin, now=length.now)
            )
    for name, words in (
        (CUT, tr("truncated completions")),
        (REPETITIVE, tr("completions that repeat themselves")),
        (UNPARSED, tr("answers that cannot be parsed")),
    ):
        series = h.series.get(name)
        if series is not None and series.now > series.begin + limit("share_rise"):
            found.append(
                tr("{words} {begin:.0%} -> {now:.0%}", words=words, begin=series.begin, now=series.now)
            )
    return found


def _weighted(series: Series, way: float, is_first: bool) -> float:
    """The mean of the first or the newest values, by how many completions each saw."""
    values = series.first if is_first else [series.last[-i] for i in range(1, 1 + min(20, len(series.last)))]
    total = sum(v.count for v in values)
    return way * sum(v.value * v.count for v in values) / total if total else 0.0


F207 = Rule(
    code="F207",
    title="One reward rises, another falls",
    why="The total reward may rise although the run gets worse at what matters.",
    check=hacking,
    when="one reward has risen and another has fallen, and the total has not fallen",
)


F208 = Rule(
    code="F208",
    title="Held-out reward falls",
    why="The model gets better on the training prompts and worse on others: it memorizes instead of learning "
    "the task.",
    check=held_out_falls,
    each="evaluation",
    when=f"{num('eval_fall_values')} evaluations are {pct('eval_fall_share')} below the best one, and the "
    "training reward is higher",
)


F221 = Rule(
    code="F221",
    title="The model broke down",
    why="The reward is far below its earlier level, and the completions have changed completely. Weights "
    "that have changed this much rarely recover, whatever the later steps do.",
    check=breakdown,
    when="the total reward has fallen, or a part of it while no other part has risen, and the "
    "completions have changed: KL, entropy, length, cut, repeated or unreadable ones",
)


F222 = Rule(
    code="F222",
    title="Reward far below its initial value",
    why="The newest model is worse than an earlier one, so continuing costs time and does not make it "
    "better.",
    check=fell,
    streak=LASTING,
    when="the reward has fallen by a quarter more than in F221, or a held-out reward is a quarter below "
    "its best, and the completions look as before",
)


F223 = Rule(
    code="F223",
    title="The reward depends on the length",
    why="The reward rises because completions get longer or shorter, not because the answers get better.",
    check=length_is_paid,
    streak=LASTING,
    when=f"within groups the reward and the length have a correlation of {num('length_correlation')}, "
    f"lengths are {num('length_paid_share')} times or {num('length_short_share')} of their start in its "
    "direction, the reward has risen, and no other part of it has risen in a run that gets better",
)


F224 = Rule(
    code="F224",
    title="The same completion for every prompt",
    why="The model no longer reads its prompts; it cannot learn the task from such completions.",
    check=one_answer,
    streak=LASTING,
    when=f"{pct('one_answer')} of the completions of at least four prompts are the same text; at the "
    f"start it was less than {pct('one_answer_start')}",
)
