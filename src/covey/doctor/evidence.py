"""What the records show, in a few lines of numbers."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median

from covey.doctor.log import Log
from covey.health.baseline import fallen, total_of
from covey.health.history import History
from covey.health.names import ENTROPY, IDENTICAL, REPETITIVE, UNPARSED

_ZERO_LOSS = 1e-6


def evidence(log: Log, history: History, trend: tuple[float, float, int] | None) -> list[tuple[str, str]]:
    """Pairs of a label and a text: the run, what moved, what completions look like, what is on disk."""
    of = "" if log.total_steps is None else f" of {log.total_steps:,}"
    lines = [("run", f"{log.path}, written by {log.source}; {log.last_step:,}{of} optimizer steps")]
    lines += _reward(history, trend)
    lines += _movement(history)
    lines += _completions(history)
    if log.saved or log.source == "covey":
        steps = ", ".join(str(s) for s in log.saved[-3:])
        lines.append(("saved", f"checkpoints of step {steps}" if steps else "no whole checkpoint"))
    said = Counter(str(e.get("code")) for e in log.events if e.get("kind") == "finding")
    if said:
        lines.append(("events", ", ".join(f"{code} x {n}" for code, n in said.items()) + " on record"))
    return lines + [("note", note) for note in log.notes]


def _reward(h: History, trend: tuple[float, float, int] | None) -> list[tuple[str, str]]:
    lines = []
    series = h.series.get(total_of(h))
    if series is not None and series.first:
        words = [f"{series.begin:.4g} at step {series.first[0].step}"]
        change = fallen(h, total_of(h))
        if change is not None and change.before != series.begin:
            words.append(f"{change.before:.4g} {change.when}")
        words.append(f"{series.now:.4g} over the newest {min(len(series.last), 5)}")
        if trend is not None:
            way = ("no clear change", "rises", "falls")[trend[2]]
            words.append(f"first quarter {trend[0]:.4g}, last quarter {trend[1]:.4g}: {way}")
        else:
            words.append("too few values for a trend")
        lines.append(("reward", "; ".join(words)))
    if "eval_reward" in h.series:
        values = h.series["eval_reward"].last
        best = max(values, key=lambda v: v.value)
        newest = values[-1]
        text = f"best {best.value:.4g} at step {best.step}, newest {newest.value:.4g} at step {newest.step}"
        lines.append(("held-out", text))
    if "frac_reward_zero_std" in h.series:
        shares = [1 - v for v in h.series["frac_reward_zero_std"].last.numbers(20)]
        text = f"{fmean(shares):.0%} of the groups of the last {len(shares)} records have different rewards"
        lines.append(("signal", text))
    return lines


def _movement(h: History) -> list[tuple[str, str]]:
    parts = []
    norms = h.series["grad_norm"].last.numbers() if "grad_norm" in h.series else ()
    if norms:
        parts.append(f"median norm {median(norms):.3g}, newest {norms[-1]:.3g}")
    for name, words in (("learning_rate", "learning rate"), ("kl", "KL"), ("update_ratio", "update ratio")):
        if name in h.series:
            parts.append(f"{words} {h.series[name].last[-1].value:.3g}")
    lines = [("gradient", "; ".join(parts))] if parts else []
    losses = h.series["loss"].last.numbers() if "loss" in h.series else ()
    zero = sum(abs(x) < _ZERO_LOSS for x in losses)
    if norms and zero > len(losses) / 2 and norms[-1] > 0:
        text = f"next to 0 at {zero} of {len(losses)} steps, as it is on fresh samples, whose advantages"
        lines.append(("loss", f"{text} add up to 0; the gradient is what counts"))
    return lines


def _completions(h: History) -> list[tuple[str, str]]:
    names = (
        ("completions/mean_length", "{:.4g} tokens on average"),
        ("completions/clipped_ratio", "{:.0%} cut"),
        (REPETITIVE, "{:.0%} repeat themselves"),
        (UNPARSED, "{:.0%} without a readable answer"),
    )
    parts = [text.format(h.series[n].last[-1].value) for n, text in names if n in h.series]
    if IDENTICAL in h.series:
        share = h.series[IDENTICAL].last[-1].value
        parts.append(f"in {share:.0%} of the groups all are the same")
    lines = [("newest", "completions: " + ", ".join(parts))] if parts else []
    entropy = next((h.series[n] for n in ENTROPY if n in h.series), None)
    if entropy is not None:
        first, last = entropy.last[0] if not entropy.first else entropy.first[0], entropy.last[-1]
        lines.append(
            (
                "entropy",
                f"{first.value:.3g} nats a token at step {first.step}, {last.value:.3g} at step {last.step}",
            )
        )
    return lines
