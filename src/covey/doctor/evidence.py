"""What the records show, in a few lines of numbers."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median

from covey.doctor.log import Log
from covey.doctor.trend import Trend
from covey.health.baseline import fallen, total_of
from covey.health.history import History
from covey.health.names import ENTROPY, IDENTICAL, INVALID, REPETITIVE, UNPARSED
from covey.health.signs.unearned import constant_words
from covey.texts import filled, joined, plural, tr
from covey.texts.numbers import told

_ZERO_LOSS = 1e-6


def evidence(log: Log, history: History, trend: Trend | None) -> list[tuple[str, str]]:
    """Pairs of a label and a text: the run, what moved, what completions look like, what is on disk."""
    of = "" if log.total_steps is None else tr(" of {total_steps:,}", total_steps=log.total_steps)
    lines = [
        (
            tr("run"),
            plural(
                log.total_steps or log.last_step,
                "{path}, written by {source}; {last_step:,}{of} optimizer step",
                "{path}, written by {source}; {last_step:,}{of} optimizer steps",
                path=log.path,
                source=log.source,
                last_step=log.last_step,
                of=of,
            ),
        )
    ]
    lines += _reward(history, trend)
    lines += _movement(history)
    lines += _completions(history)
    if log.saved or log.source == "covey":
        steps = ", ".join(str(s) for s in log.saved[-3:])
        lines.append(
            (
                tr("saved"),
                tr("checkpoints of step {steps}", steps=steps) if steps else tr("no complete checkpoint"),
            )
        )
    said = Counter(str(e.get("code")) for e in log.events if e.get("kind") == "finding")
    if said:
        lines.append(
            (
                tr("events"),
                tr("recorded: {events}", events=joined(", ", [f"{code} x {n}" for code, n in said.items()])),
            )
        )
    return lines + [(tr("note"), note) for note in log.notes]


def _reward(h: History, trend: Trend | None) -> list[tuple[str, str]]:
    lines = []
    series = h.series.get(total_of(h))
    if series is not None and series.first:
        begin, now = told(series.begin, series.now)
        words = [tr("{begin} at step {step}", begin=begin, step=series.first[0].step)]
        change = fallen(h, total_of(h))
        if change is not None and change.before != series.begin:
            words.append(tr("{before} {when}", before=told(change.before, series.now)[0], when=change.when))
        words.append(tr("{now} over the newest {count}", now=now, count=min(len(series.last), 5)))
        if trend is not None:
            way = (tr("no clear change"), tr("it rises"), tr("it falls"))[trend.way]
            first, last = trend.words
            words.append(
                tr(
                    "mean of the first quarter {first}, of the last quarter {last}: {way}",
                    first=first,
                    last=last,
                    way=way,
                )
            )
        else:
            words.append(tr("too few values for a trend"))
        lines.append((tr("reward"), joined("; ", words)))
    if steady := constant_words(h):
        lines.append((tr("constant"), joined("; ", steady)))
    if "eval_reward" in h.series:
        values = h.series["eval_reward"].last
        best = max(values, key=lambda v: v.value)
        newest = values[-1]
        best_word, newest_word = told(best.value, newest.value)
        text = tr(
            "best {best} at step {best_step}, newest {newest} at step {newest_step}",
            best=best_word,
            best_step=best.step,
            newest=newest_word,
            newest_step=newest.step,
        )
        lines.append((tr("held-out"), text))
    if "frac_reward_zero_std" in h.series:
        shares = [1 - v for v in h.series["frac_reward_zero_std"].last.numbers(20)]
        text = tr(
            "in the last {num_records} records, {share:.0%} of the groups have different rewards",
            share=fmean(shares),
            num_records=len(shares),
        )
        lines.append((tr("signal"), text))
    return lines


def _movement(h: History) -> list[tuple[str, str]]:
    parts = []
    norms = h.series["grad_norm"].last.numbers() if "grad_norm" in h.series else ()
    if norms:
        parts.append(
            tr("median norm {median:.3g}, newest {newest:.3g}", median=median(norms), newest=norms[-1])
        )
    for name, words in (
        ("learning_rate", tr("learning rate")),
        ("kl", "KL"),
        ("update_ratio", tr("update ratio")),
    ):
        if name in h.series:
            parts.append(tr("{words} {value:.3g}", words=words, value=h.series[name].last[-1].value))
    lines = [(tr("gradient"), joined("; ", parts))] if parts else []
    losses = h.series["loss"].last.numbers() if "loss" in h.series else ()
    zero = sum(abs(x) < _ZERO_LOSS for x in losses)
    if norms and zero > len(losses) / 2 and norms[-1] > 0:
        text = tr(
            "near 0 at {zero} of {num_losses} steps. That is normal on fresh samples, whose advantages sum "
            "to 0; look at the gradient instead.",
            zero=zero,
            num_losses=len(losses),
        )
        lines.append((tr("loss"), text))
    return lines


def _completions(h: History) -> list[tuple[str, str]]:
    names = (
        ("completions/mean_length", tr("{value:.4g} tokens on average")),
        ("completions/clipped_ratio", tr("{value:.0%} cut")),
        (REPETITIVE, tr("{value:.0%} repeat themselves")),
        (UNPARSED, tr("{value:.0%} without a readable answer")),
    )
    parts = [filled(text, value=h.series[n].last[-1].value) for n, text in names if n in h.series]
    if (invalid := h.series.get(INVALID)) and (newest := invalid.last[-1]).value:
        parts.append(tr("{share:.0%} without a reward", share=newest.value / newest.count))
    if IDENTICAL in h.series:
        share = h.series[IDENTICAL].last[-1].value
        parts.append(tr("all completions are the same in {share:.0%} of the groups", share=share))
    lines = [(tr("newest"), tr("completions: {parts}", parts=joined(", ", parts)))] if parts else []
    entropy = next((h.series[n] for n in ENTROPY if n in h.series), None)
    if entropy is not None:
        first, last = entropy.last[0] if not entropy.first else entropy.first[0], entropy.last[-1]
        lines.append(
            (
                tr("entropy"),
                tr(
                    "{first:.3g} nats per token at step {first_step}, {last:.3g} at step {last_step}",
                    first=first.value,
                    first_step=first.step,
                    last=last.value,
                    last_step=last.step,
                ),
            )
        )
    return lines
