from __future__ import annotations

import io
import logging
import sys

import pytest

from covey.telemetry.console import Console, Terminal
from covey.types import Metric, StepRecord


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(step: int, reward: float = 0.5) -> StepRecord:
    values = {
        "reward": reward,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.25,
        "kl": None,
        "grad_norm": 0.0,
        "completions/mean_length": 31.25,
        "throughput/tokens_per_s": 5120.0,
    }
    return StepRecord(
        step=step, rollout=0, pass_index=0, metrics={k: Metric(value=v) for k, v in values.items()}
    )


def plain(total: int, every: int, num_steps: int, start: int = 1) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Console(total, every, stream, clock=clock) as console:
        for step in range(start, start + num_steps):
            clock.now += 10 if step == start else 2
            console.step(record(step))
    return stream.getvalue().splitlines()


def test_plain_lines_are_exactly_these() -> None:
    rest = "reward 0.500 ±0.250  signal 75%  kl –  grad 0  len 31.2  5.12k tok/s"
    assert plain(4, 1, 4) == [
        f"step 1/4  {rest}  – left  0:10",
        f"step 2/4  {rest}  0:04 left  0:12",
        f"step 3/4  {rest}  0:02 left  0:14",
        f"step 4/4  {rest}  0:00 left  0:16",
    ]


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("step").split("/")[0]) for line in lines]


@pytest.mark.parametrize(
    ("total", "every", "expected"),
    [
        (400, 1, [1, *range(20, 401, 20)]),
        (10, 1, list(range(1, 11))),
        (400, 150, [1, 150, 300, 400]),
        (30, 2, [1, *range(2, 31, 2)]),
    ],
)
def test_plain_lines_are_thinned(total: int, every: int, expected: list[int]) -> None:
    assert steps_of(plain(total, every, total)) == expected


def test_a_resumed_run_shows_its_first_step_and_its_own_pace() -> None:
    lines = plain(400, 1, 60, start=201)
    assert steps_of(lines) == [201, 220, 240, 260]
    assert "4:40 left" in lines[-1]  # 140 steps of 2 s


def test_texts_come_between_plain_lines() -> None:
    stream = io.StringIO()
    with Console(2, 1, stream) as console:
        console.step(record(1))
        console.say("[red] saved 中 checkpoint-1")
        console.step(record(2))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/2",
        "[red] saved 中 checkpoint-1",
        "step 2/2",
    ]


def test_an_ascii_stream_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Console(1, 1, stream) as console:
        console.step(record(1))
    assert b"kl -  grad 0" in raw.getvalue() and b"0.500 ?0.250" in raw.getvalue()


def live(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, width=width, height=20)
    return Console(400, 1, stream, terminal=terminal), stream


@pytest.mark.parametrize("width", [100, 80])
def test_the_live_line_holds_the_fields_and_fits(width: int) -> None:
    console, stream = live(width)
    with console:
        for step in (1, 2, 120):
            console.step(record(step, reward=step / 400))
    last = stream.getvalue().split("\r")[-1]
    line = last.split("\x1b[2K")[-1].split("\n")[0]
    assert len(line) <= width and "\x1b" not in line
    for part in ("120/400", "0.300 ±0.250", "75%", "kl –", "31.2", "5.12k", "left"):
        assert part in line, part
    assert stream.getvalue().count("2/400") >= 1 and "0.005 ±0.250" in stream.getvalue()


def test_a_text_stands_above_the_live_line() -> None:
    console, stream = live(100)
    with console:
        console.step(record(1))
        console.say("[bold] saved checkpoint-1")
    text = stream.getvalue()
    said = text.index("[bold] saved checkpoint-1")
    assert "1/400" in text[:said] and "1/400" in text[said:]


class Broken(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader has gone")


@pytest.mark.parametrize("is_live", [True, False])
def test_an_error_while_drawing_ends_the_view_and_is_said_once(
    is_live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Broken()
    terminal = Terminal(file=stream, force_terminal=True, width=100) if is_live else None
    with caplog.at_level(logging.WARNING), Console(5, 1, stream, terminal=terminal) as console:
        for step in range(1, 6):
            console.step(record(step))
        console.say("saved checkpoint-5")
    assert type(sys.stdout).__module__ != "rich.file_proxy"
    messages = [r.getMessage() for r in caplog.records]
    assert messages[0].startswith("the terminal view is off (BrokenPipeError")
    assert messages[1:] == ["saved checkpoint-5"]


def test_a_record_that_cannot_be_drawn_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    bad = StepRecord(step=1, rollout=0, pass_index=0, metrics={"reward": Metric(value="high")})  # type: ignore[arg-type]
    stream = io.StringIO()
    with Console(2, 1, stream) as console:
        console.step(bad)
        console.step(record(2))
    assert "TypeError" in caplog.text and stream.getvalue() == ""


def test_an_error_of_the_run_is_not_swallowed() -> None:
    with pytest.raises(OSError, match="disk full"), Console(2, 1, io.StringIO()):
        raise OSError("disk full")
