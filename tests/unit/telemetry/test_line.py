from __future__ import annotations

import math

import pytest

from covey.telemetry.line import format_duration, format_line, format_number, format_share
from covey.types import Metric, StepRecord


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1e-9, "1.0e-09"),
        (-0.00042, "-4.2e-04"),
        (0.001, "0.001"),
        (0.25, "0.250"),
        (-1.234, "-1.23"),
        (12.34, "12.3"),
        (312.4, "312"),
        (5123.0, "5.12k"),
        (2.5e6, "2.50M"),
        (3e15, "3.0e+15"),
        (None, "–"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_only_zero_looks_like_zero() -> None:
    for exponent in range(-320, 3):
        text = format_number(10.0**exponent)
        assert float(text.removesuffix("k")) != 0, exponent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (0.004, "<1%"),
        (0.875, "88%"),
        (0.999, ">99%"),
        (1.0, "100%"),
        (None, "–"),
        (math.nan, "nan"),
    ],
)
def test_shares(value: float | None, text: str) -> None:
    assert format_share(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0:00"), (59.6, "1:00"), (761, "12:41"), (11_100, "3:05:00"), (183_600, "2d 3h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def full_record(kl: float | None) -> StepRecord:
    values = {
        "reward": 0.8123,
        "reward_std": 0.214,
        "frac_reward_zero_std": 0.125,
        "kl": kl,
        "grad_norm": 0.4123,
        "completions/mean_length": 312.4,
        "throughput/tokens_per_s": 5123.0,
    }
    return StepRecord(
        step=120, rollout=1, pass_index=0, metrics={k: Metric(value=v) for k, v in values.items()}
    )


def test_the_line_at_full_length() -> None:
    assert format_line(full_record(None), 400, elapsed="2:03", left="2:41", width=None) == (
        "step 120/400  reward 0.812 ±0.214  signal 88%  kl –  grad 0.412  len 312  "
        "5.12k tok/s  2:41 left  2:03"
    )


@pytest.mark.parametrize("width", [100, 80, 60, 20])
@pytest.mark.parametrize(("total", "kl", "left"), [(400, None, "2:41"), (4000, 3.2e-5, "2:12:41")])
def test_the_line_fits_and_keeps_what_tells_most(width: int, total: int, kl: float | None, left: str) -> None:
    line = format_line(full_record(kl), total, elapsed="12:03:11", left=left, width=width)
    assert len(line) <= width
    assert f"120/{total}" in line
    if width >= 60:
        assert "0.812 ±0.214" in line and "88%" in line and f"{left} left" in line
    if width >= 80:
        assert line.count("reward") == 1
        assert ("kl –" if kl is None else "kl 3.2e-05") in line and "0.412" in line
    if width == 100:
        assert "5.12k" in line and "312" in line


def test_a_record_without_metrics_is_all_dashes() -> None:
    empty = StepRecord(step=1, rollout=0, pass_index=0, metrics={})
    assert format_line(empty, 9, elapsed="0:01", left="–", width=None) == (
        "step 1/9  reward – ±–  signal –  kl –  grad –  len –  – tok/s  – left  0:01"
    )


def of_tasks(**rewards: float | None) -> str:
    values = {"reward": 0.5, **{f"tasks/{task}/reward": value for task, value in rewards.items()}}
    values |= {f"tasks/{task}/completions/mean_length": 9.0 for task in rewards}
    metrics = {name: Metric(value=value) for name, value in values.items()}
    record = StepRecord(step=1, rollout=0, pass_index=0, metrics=metrics)
    return format_line(record, 9, elapsed="0:01", left="0:08", width=None)


def test_the_rewards_of_a_few_tasks_stand_at_the_end() -> None:
    assert of_tasks(math=0.25, chat=None).endswith("0:01  math 0.250  chat –")
    assert of_tasks().endswith("0:01")
    assert of_tasks(**{f"t{i}": 0.5 for i in range(5)}).endswith("0:01")
