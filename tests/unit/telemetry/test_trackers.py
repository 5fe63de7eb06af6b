from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.telemetry.trackers import factory, worker
from covey.telemetry.trackers.factory import Trackers, missing, start
from covey.telemetry.trackers.protocol import Start
from covey.telemetry.trackers.tensorboard import markdown


class Fake:
    """A tracker that keeps what it gets, after doing what the test plants."""

    def __init__(self, planted: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.planted = planted

    def open(self, start: Start) -> Fake:
        self.planted("open")
        self.calls.append(("open", start.run_name, dict(start.config)))
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.planted("log")
        self.calls.append(("log", step, dict(metrics)))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.planted("table")
        self.calls.append(("table", step, name, list(rows)))

    def close(self, exit_code: int) -> None:
        self.planted("close")
        self.calls.append(("close", exit_code))


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.threads: set[str] = set()

    def say(self, line: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines.append(line)

    def event(self, kind: str, **fields: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append({"kind": kind, **fields})


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which a stuck client would end this process; only a process of its own tries that."""
    codes: list[int] = []
    monkeypatch.setattr(factory, "leave_in_time", codes.append)
    return codes


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the threads that a test has blocked."""
    event = threading.Event()
    yield event
    event.set()


def begin(said: Said, *, may_exit: bool = True, **fakes: Fake) -> Trackers:
    return start(
        {name: fake.open for name, fake in fakes.items()},
        run_name="r",
        output_dir=Path("unused"),
        config={"lr": 0.1},
        say=said.say,
        event=said.event,
        may_exit=may_exit,
    )


def at(call: str, act: Callable[[], object]) -> Callable[[str], None]:
    return lambda now: (act(), None)[1] if now == call else None


def throw(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_records_arrive_in_order_without_empty_values() -> None:
    said, fake = Said(), Fake()
    trackers = begin(said, a=fake)
    trackers.log(3, {"reward": -1.0, "kl": None, "loss": 0.0})
    trackers.table(3, "completions", [{"prompt": "p"}])
    trackers.table(4, "completions", [])
    trackers.close(0)
    trackers.close(0)
    assert fake.calls == [
        ("open", "r", {"lr": 0.1}),
        ("log", 3, {"reward": -1.0, "loss": 0.0}),
        ("table", 3, "completions", [{"prompt": "p"}]),
        ("close", 0),
    ]
    assert (said.lines, said.events) == ([], [])


@pytest.mark.parametrize("error", [ValueError("bad key\nmore"), SystemExit(7), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_one_that_raises_is_switched_off_and_the_others_go_on(call: str, error: BaseException) -> None:
    said, bad, good = Said(), Fake(at(call, throw(error))), Fake()
    trackers = begin(said, bad=bad, good=good)
    for step in range(1, 6):
        trackers.log(step, {"reward": 0.5})
    trackers.close(3)
    assert [c[1] for c in good.calls if c[0] == "log"] == [1, 2, 3, 4, 5]
    assert good.calls[-1] == ("close", 3)
    reason = {ValueError: "bad key", SystemExit: "7", KeyboardInterrupt: "no reason given"}[type(error)]
    named = f"{type(error).__name__}: {reason}"
    assert said.events == [{"kind": "tracker_failed", "name": "bad", "error": named}]
    assert said.lines[0] == f"bad is switched off ({named}); the run continues"
    assert said.threads == {threading.current_thread().name}


def test_a_failure_or_two_do_not_switch_off() -> None:
    said, failures = Said(), [ValueError("x"), ValueError("y")]
    fake = Fake(lambda call: throw(failures.pop())() if call == "log" and failures else None)
    trackers = begin(said, a=fake)
    for step in range(1, 5):
        trackers.log(step, {"reward": 0.5})
    trackers.close(0)
    assert [c[1] for c in fake.calls if c[0] == "log"] == [3, 4]
    assert said.events == []
    assert said.lines == ["a lost 2 records; the files of the run have all of them"]


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_one_that_blocks_delays_no_step_and_close_returns(
    call: str, release: threading.Event, left: list[int]
) -> None:
    said, blocked, good = Said(), Fake(at(call, release.wait)), Fake()
    trackers = begin(said, blocked=blocked, good=good)
    times = []
    for step in range(1, 2001):
        before = time.perf_counter()
        trackers.log(step, {"reward": 0.5})
        times.append(time.perf_counter() - before)
    assert sorted(times)[len(times) // 2] < 200e-6
    before = time.perf_counter()
    trackers.close(5, patience_s=0.3)
    assert time.perf_counter() - before < 4.0
    assert left == [5]
    assert said.lines[:2] == [
        "nothing was sent for 0.3 s; covey no longer waits for the trackers",
        "blocked had not finished; records that it had not sent may be lost",
    ]
    if call == "open":
        assert said.lines[2].startswith("blocked lost 2000 records")


def test_a_slow_one_gets_the_time_that_it_needs(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    """Each record takes less than the patience, all of them together more."""
    monkeypatch.setattr(factory, "_FIRST_WORD_S", 0.0)
    said, fake = Said(), Fake(at("log", lambda: time.sleep(0.5)))
    trackers = begin(said, slow=fake)
    for step in range(6):
        trackers.log(step, {"reward": 0.5})
    waits: list[None] = []
    trackers.close(0, patience_s=2.0, progress=lambda: waits.append(None))
    assert [c[1] for c in fake.calls if c[0] == "log"] == list(range(6)) and fake.calls[-1] == ("close", 0)
    assert len(waits) > 5 and left == []
    (line,) = said.lines
    assert line.startswith("waiting for slow to send ") and line.endswith(" records; Ctrl-C stops waiting")


@pytest.mark.parametrize("may_exit", [True, False])
def test_ctrl_c_ends_the_waiting(may_exit: bool, release: threading.Event, left: list[int]) -> None:
    """The process of a command then ends, that of a program goes on."""
    said, blocked = Said(), Fake(at("close", release.wait))
    trackers = begin(said, may_exit=may_exit, blocked=blocked)
    trackers.log(1, {"reward": 0.5})
    trackers.close(5, progress=throw(KeyboardInterrupt()))
    assert said.lines == [
        "interrupted; covey no longer waits for the trackers",
        "blocked had not finished; records that it had not sent may be lost",
    ]
    assert left == ([5] if may_exit else [])


def test_a_full_queue_drops_the_oldest(monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> None:
    monkeypatch.setattr(worker, "_QUEUE", 3)
    said, fake = Said(), Fake(at("open", release.wait))
    trackers = begin(said, a=fake)
    for step in range(1, 11):
        trackers.log(step, {"reward": 0.5})
    release.set()
    trackers.close(0)
    assert [c[1] for c in fake.calls if c[0] == "log"] == [8, 9, 10]
    assert said.lines == ["a lost 7 records; the files of the run have all of them"]


def test_a_tracker_prints_nothing_and_others_still_do(capsys: pytest.CaptureFixture[str]) -> None:
    heard, stream = threading.Event(), sys.stdout

    def noisy(call: str) -> None:
        sys.stdout.write(f"banner {call}\n")
        sys.stderr.write(f"warning {call}\n")
        if call == "log":
            heard.wait(5)

    trackers = begin(Said(), a=Fake(noisy))
    trackers.log(1, {"reward": 0.5})
    sys.stdout.write("ours\n")
    heard.set()
    trackers.close(0)
    assert capsys.readouterr() == ("ours\n", "")
    assert sys.stdout is stream


def test_missing_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: None if name == "mlflow" else name)
    assert missing(["none", "tensorboard", "mlflow"]) == [("mlflow", "mlflow-skinny")]


def test_markdown_keeps_a_row_on_its_line() -> None:
    rows = [{"p": "a|b\nc", "r": 1.0}, {"p": "<b>", "n": None}]
    assert markdown(rows) == ("| p | r | n |\n|---|---|---|\n| a\\|b<br>c | 1.0 |  |\n| &lt;b&gt; |  |  |")


STUCK = """
import atexit, sys, threading, time
from pathlib import Path
from covey.telemetry.trackers.factory import start

def block(start):
    atexit.register(time.sleep, 60)
    threading.Thread(target=time.sleep, args=(60,)).start()
    time.sleep(60)

trackers = start({"stuck": block}, run_name=None, output_dir=Path("unused"), config={},
                      say=print, event=lambda kind, **fields: None, may_exit=True)
time.sleep(0.2)
trackers.close(3, patience_s=0.2)
print("end of run")
sys.exit(3)
"""


def test_a_process_ends_though_a_client_waits_at_exit() -> None:
    before = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=40, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, "end of run")
    assert time.perf_counter() - before < 20
