"""What a process tells NCCL's flight recorder, and what a finding looks like on the terminal."""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path

import pytest

from covey.activity import Activity, Stopped
from covey.errors import ConfigError
from covey.meeting import Meeting
from covey.training.failure import text_of
from covey.training.limits import Signals
from covey.training.process import handlers, long_lived, ranks, record_collectives
from covey.training.together import Together
from covey.types import Finding, Fix

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
FORMER = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def test_the_flight_recorder_is_on(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    record_collectives(tmp_path, environment)
    assert environment == dict(zip(NAMES, ("2000", str(tmp_path / "nccl-rank-"), "1"), strict=True))


@pytest.mark.parametrize("name", [*NAMES, *FORMER])
def test_what_the_environment_says_stays(tmp_path: Path, name: str) -> None:
    environment = {name: "mine"}
    record_collectives(tmp_path, environment)
    assert environment[name] == "mine"
    assert len(environment) == 3


def test_torch_reads_these_names() -> None:
    """In the headers and the library that torch comes with."""
    import torch

    root = Path(torch.__file__).parent
    headers = root / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = (headers / "FlightRecorder.hpp").read_text() + (headers / "ProcessGroupNCCL.hpp").read_text()
    assert '{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}' in text
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in text


def test_a_finding_has_four_parts_and_a_line_to_copy() -> None:
    found = Finding(
        code="F301",
        seen="a",
        why="b.",
        cause="c",
        fixes=(Fix(text="d", edits={"max_steps": 3}), Fix(text="e")),
    )
    assert text_of(found) == ["F301      a. b. c.", f"{'':10}d.", f"{'':10}--max_steps 3", f"{'':10}e."]


def test_what_is_there_is_left_out_of_garbage_collection():
    """For as long as the block lasts, and never what somebody else has left out."""
    with long_lived():
        pass
    assert gc.get_freeze_count() > 0  # what tests/conftest.py has left out
    gc.unfreeze()
    try:
        with long_lived():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_a_rank_whose_first_one_is_not_there_says_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    monkeypatch.setattr("covey.training.process.MEET_S", 1.0)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as error, ranks(2):
        pass
    (problem,) = error.value.problems
    assert (
        problem.code == "E375"
        and f"Rank 1 of 2 could not join the others at 127.0.0.1:{port}" in problem.seen
    )


def test_a_signal_waits_where_ranks_compute_together(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said at once, raises nothing in the middle of a step, and can be asked for between two."""
    activity, signals = Activity(), Signals()
    with handlers(signals, activity):
        with activity.stoppable_between_steps():
            assert not activity.has_to_stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert activity.has_to_stop and signals.received == signal.SIGTERM
        assert not activity.has_to_stop
        with pytest.raises(Stopped), activity.stoppable():
            raise AssertionError("it was asked to stop before")
    assert "dropping this rollout" in capsys.readouterr().err


def test_sigterm_changes_nothing_once_a_command_has_ended_its_run() -> None:
    """The first handlers are back in a program, after an error, and for Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with handlers(Signals(), Activity()):
        pass
    assert [signal.getsignal(number) for number in numbers] == before
    with pytest.raises(OSError), handlers(Signals(), Activity(), owns_process=True):
        raise OSError
    assert [signal.getsignal(number) for number in numbers] == before
    try:
        with handlers(Signals(), Activity(), owns_process=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == before[0]
    finally:
        signal.signal(signal.SIGTERM, before[1])


def test_the_signal_of_another_process_comes_only_to_the_handlers_of_the_run(tmp_path: Path) -> None:
    """One that is passed on late would end the process by another code."""
    place, signals, late = Meeting(tmp_path, 0, 2), Signals(), []
    place.signal.write_text(str(int(signal.SIGTERM)), encoding="ascii")
    others = Together(place)
    before = signal.signal(signal.SIGTERM, lambda *_: late.append(True))
    try:
        with handlers(signals, Activity()), others.passing_signals(signals):
            for _ in range(2):
                others._poll(place)
        assert signals.received == signal.SIGTERM
        signals.received = 0
        for _ in range(2):
            others._poll(place)
        assert not late and not signals.received
    finally:
        signal.signal(signal.SIGTERM, before)
