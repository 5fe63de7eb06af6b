from __future__ import annotations

import io
import logging
import re
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
        for step in (1, 2, 119):
            console.step(record(step, reward=step / 400))
        shown = stream.getvalue()
    line = shown.split("\r")[-1].split("\x1b[2K")[-1].split("\n")[0]
    assert len(line) <= width and "\x1b" not in line
    for part in ("119/400", "reward 0.297 ±0.250", "75%", "kl –", "31.2", "5.12k", "left"):
        assert part in line, part
    assert shown.count("2/400") >= 1 and "0.005 ±0.250" in shown


def on_screen(written: str) -> list[str]:
    """The lines that stand on a terminal in the end, which knows how to go up a line and to erase one."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b"):
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_each_step_of_a_short_run_stays_on_a_terminal() -> None:
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, width=80, height=20)
    with Console(3, 1, stream, terminal=terminal) as console:
        console.step(record(1))
        console.step(record(2))
        assert "step 3/3 is running" in on_screen(stream.getvalue())[-1]
        console.step(record(3))
        console.say("done")
    lines = on_screen(stream.getvalue())
    assert [line.split("reward")[0].split()[-1] for line in lines[:3]] == ["1/3", "2/3", "3/3"]
    assert lines[3:] == ["done"]


def test_the_step_that_a_long_run_stopped_at_stays_in_front_of_its_last_words() -> None:
    console, stream = live(80)
    with console:
        for step in range(1, 24):
            console.step(record(step))
        console.say("stopped")
    lines = on_screen(stream.getvalue())
    assert [line.split("/400")[0].split()[-1] for line in lines[:3]] == ["1", "20", "23"]
    assert lines[3:] == ["stopped"]


def test_a_text_stands_above_the_live_line() -> None:
    console, stream = live(100)
    with console:
        console.step(record(1))
        console.say("[bold] saved checkpoint-1")
    text = stream.getvalue()
    said = text.index("[bold] saved checkpoint-1")
    assert "1/400" in text[:said] and "2/400 is running" in text[said:]


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
