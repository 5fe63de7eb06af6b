"""One line about one step, as wide as there is room."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from covey.texts import tr
from covey.texts.catalogue import columns
from covey.texts.language import spoken
from covey.texts.numbers import told
from covey.types import Metric, StepRecord

_DASH = "–"
_MOST_TASKS = 4
_REWARD = 1
_THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field in its long and its short form; the highest `rank` is the first to be shortened or left out."""

    long: str
    short: str
    rank: int


def format_number(value: float | None) -> str:
    """Return a number in at most six characters or so; only an exact zero reads "0".

    `format_number(0.0004)` is "4.0e-04", of 0.25 "0.250", of 5123 "5.12k", of None a dash.
    """
    if value is None:
        return _DASH
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e12:
        return f"{value:.1e}"
    for unit, letter in _THOUSANDS:
        if size >= unit:
            return _three_digits(value / unit) + letter
    return _three_digits(value)


def format_share(value: float | None) -> str:
    """Return a share in per cent; only an exact 0 reads "0%" and only an exact 1 reads "100%"."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    percent = round(100 * value)
    if 0 < value < 1 and percent in (0, 100):
        return "<1%" if percent == 0 else ">99%"
    return f"{percent}%"


def format_duration(seconds: float) -> str:
    """Return a duration: "0:07", "12:41", "3:05:00" or "2d 3h"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_line(record: StepRecord, total: int, *, elapsed: str, left: str, width: int | None) -> str:
    """Return the line of a step in at most `width` columns (None: as long as it is).

    Labels are shortened one by one, then the least telling fields go. The reward keeps its label for longest.
    """
    fields = [
        _Field(long=spoken(field.long), short=spoken(field.short), rank=field.rank)
        for field in _fields(record, total, elapsed, left)
    ]
    texts = {field.rank: field.long for field in fields}
    shorter = sorted(fields, key=lambda field: -field.rank)
    reward = next(field for field in fields if field.rank == _REWARD)
    steps = [(field.rank, field.short) for field in shorter if field is not reward]
    steps += [(field.rank, "") for field in shorter if field.rank > _REWARD]
    steps += [(_REWARD, reward.short), (_REWARD, "")]
    for rank, text in steps:
        if width is None or columns(_join(texts)) <= width:
            break
        texts[rank] = text
    return _join(texts)


def _fields(record: StepRecord, total: int, elapsed: str, left: str) -> list[_Field]:
    metrics = record.metrics
    step = f"{record.step:>{len(str(total))}}/{total}"
    no_signal = _value(metrics, "frac_reward_zero_std")
    signal = format_share(None if no_signal is None else 1 - no_signal)
    reward, spread = _level(metrics), _text(metrics, "reward_std")
    kl, norm = _text(metrics, "kl"), _text(metrics, "grad_norm")
    length, speed = _text(metrics, "completions/mean_length"), _text(metrics, "throughput/tokens_per_s")
    return [
        _Field(long=tr("step {step}", step=step), short=step, rank=0),
        _Field(
            long=tr("reward {reward} ±{spread}", reward=reward, spread=spread),
            short=f"{reward} ±{spread}",
            rank=_REWARD,
        ),
        _Field(long=tr("signal {signal}", signal=signal), short=tr("sig {signal}", signal=signal), rank=3),
        _Field(long=tr("kl {kl}", kl=kl), short=tr("kl {kl}", kl=kl), rank=5),
        _Field(long=tr("grad {norm}", norm=norm), short=f"g {norm}", rank=4),
        _Field(long=tr("len {length}", length=length), short=f"l {length}", rank=6),
        _Field(long=tr("{speed} tok/s", speed=speed), short=f"{speed} t/s", rank=7),
        _Field(long=tr("{left} left", left=left), short=tr("{left} left", left=left), rank=2),
        _Field(long=elapsed, short=elapsed, rank=8),
        *_ahead(metrics),
        *_tasks(metrics),
        *_outcomes(metrics),
    ]


def _ahead(metrics: Mapping[str, Metric]) -> list[_Field]:
    """How old the weights are that sampled, and how long each side waits, where servers sample ahead."""
    if "age/mean" not in metrics:
        return []
    age = _text(metrics, "age/mean")
    learner, sampler = (format_share(_value(metrics, f"ahead/{who}_waits")) for who in ("learner", "sampler"))
    long = tr(
        "age {age}  model waits {learner}, servers {sampler}", age=age, learner=learner, sampler=sampler
    )
    return [_Field(long=long, short=tr("age {age}", age=age), rank=9)]


def _tasks(metrics: Mapping[str, Metric]) -> list[_Field]:
    """The reward of each of a few tasks."""
    tasks = [n.split("/")[1] for n in metrics if n.startswith("tasks/") and n.endswith("/reward")]
    if not 0 < len(tasks) <= _MOST_TASKS:
        return []
    words = "  ".join(f"{task} {_text(metrics, f'tasks/{task}/reward')}" for task in tasks)
    return [_Field(long=words, short=words, rank=10)]


def _outcomes(metrics: Mapping[str, Metric]) -> list[_Field]:
    """How many completions ended by a failure or were aborted, where some did."""
    words = {
        "infrastructure": tr("lost"),
        "policy_failure": tr("failed"),
        "aborted": tr("aborted"),
    }
    found = {word: _value(metrics, f"outcome/{name}") for name, word in words.items()}
    told = "  ".join(f"{spoken(word)} {value:.0f}" for word, value in found.items() if value)
    return [_Field(long=told, short=told, rank=11)] if told else []


def _join(texts: Mapping[int, str]) -> str:
    return "  ".join(text for text in texts.values() if text)


def _value(metrics: Mapping[str, Metric], name: str) -> float | None:
    metric = metrics.get(name)
    return None if metric is None else metric.value


def _level(metrics: Mapping[str, Metric]) -> str:
    """The reward with as many digits as its spread needs, of 1000.4 ±0.5 more than "1.00k"."""
    reward, spread = _value(metrics, "reward"), _value(metrics, "reward_std")
    if reward is None or not spread or not math.isfinite(reward + spread):
        return format_number(reward)
    near = format_number(reward + spread / 2)
    return format_number(reward) if format_number(reward) != near else told(reward, reward + spread)[0]


def _text(metrics: Mapping[str, Metric], name: str) -> str:
    return format_number(_value(metrics, name))


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{decimals}f}"
