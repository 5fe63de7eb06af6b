"""What the verbs hand to a run, what they make of how it ends, and how several processes start.

The run itself is a stand-in; its module is looked up when the verb runs.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.checks.launch import Machines
from covey.cli import launch, ranks
from covey.cli.ending import Ending
from covey.cli.main import main
from covey.cli.signals import Terminated
from covey.errors import CheckpointError, ConfigError, GuardStop
from covey.meeting import started
from covey.types import Finding, Fix, Problem
from support.verbs import WORDS, Run, raises, rank_variables


def test_the_run_gets_the_configuration(run: Run) -> None:
    assert main(["train", *WORDS, "--max_steps", "-1", "--temperature", "0.5"]) == 0
    (resolved,) = run.got
    assert (resolved.config.max_steps, resolved.config.temperature) == (-1, 0.5)
    assert resolved.sources["temperature"] == "flag --temperature"
    assert run.gathered == [1]


def terminated() -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return 0


PROBLEM = Problem(code="E301", option="model", seen="s", why="w", cause="c", fixes=(Fix(text="f"),))
FINDING = Finding(code="F101", seen="loss is nan", why="w", cause="c", fixes=(Fix(text="f"),), step=7)


@pytest.mark.parametrize(
    ("ends", "code", "shown"),
    [
        (lambda: 0, 0, ""),
        (lambda: 143, 143, ""),
        (raises(ConfigError([PROBLEM])), 2, "E301 model"),
        (raises(CheckpointError("weights.safetensors is cut short")), 2, "cut short"),
        (
            raises(GuardStop(FINDING)),
            3,
            "F101 at step 7\n  seen   loss is nan.\n  why    w\n  cause  c\n  do     f",
        ),
        (raises(KeyboardInterrupt()), 130, ""),
        (terminated, 143, ""),
    ],
)
def test_exit_codes(
    run: Run, ends: Callable[[], int], code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.ends = ends
    assert main(["train", *WORDS]) == code
    err = capsys.readouterr().err
    assert shown in err
    assert bool(err) == bool(shown)


def test_the_command_of_several_processes() -> None:
    start = launch.Start(num_processes=2, output_dir="o", max_restarts=3)
    assert launch.command("train", ["--seed", "1"], start) == [
        sys.executable, "-m", "covey.cli.torchrun", "--nnodes", "1", "--nproc_per_node", "2",
        "--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0",
        "-m", "covey", "train", "--seed", "1",
    ]  # fmt: skip


def test_the_command_of_one_of_several_machines() -> None:
    machines = Machines(count=2, number=1, address="node1", port=29501)
    start = launch.Start(num_processes=4, output_dir="o", machines=machines)
    assert launch.command("train", [], start) == [
        sys.executable, "-m", "covey.cli.torchrun", "--nnodes", "2", "--nproc_per_node", "4",
        "--max_restarts", "0", "--node_rank", "1", "--master_addr", "node1", "--master_port", "29501",
        "-m", "covey", "train",
    ]  # fmt: skip


def test_the_words_of_a_launcher_are_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`deepspeed` puts the number of a process in front of the verb."""
    for name, value in rank_variables(0, 2).items():
        monkeypatch.setenv(name, value)
    assert main(["--local_rank=0", "train", *WORDS]) == 0
    assert main(["train", *WORDS, "--local_rank=1"]) == 2


@pytest.mark.parametrize(("error", "code"), [(Terminated(), 143), (KeyboardInterrupt(), 130)])
@pytest.mark.parametrize("place", ["speaks", "leave"])
def test_a_rank_that_waits_for_another_to_speak_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, place: str
) -> None:
    """torchrun ends the other ranks as soon as the first one has said what is wrong."""

    def ended(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(f"covey.cli.main.{place}", ended)
    assert main(["train", "--model", "m", "--num_generations", "x"]) == code


@pytest.mark.parametrize(
    ("number", "last"), [(signal.SIGINT, signal.SIGKILL), (signal.SIGTERM, signal.SIGTERM)], ids=str
)
def test_a_second_signal_goes_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, last: signal.Signals
) -> None:
    """torchrun passes on the first one alone; the third Ctrl-C ends the ranks, and no SIGTERM does."""
    sent: list[tuple[str, int]] = []
    child = SimpleNamespace(send_signal=lambda number: sent.append(("torchrun", number)))
    monkeypatch.setattr(launch.os, "kill", lambda pid, number: sent.append((str(pid), number)))
    place = tmp_path / "ranks"
    place.mkdir()
    (place / "rank-0-process").write_text(f"{os.getpid()} {started(os.getpid())}")
    passed_on = launch._PassedOn(Ending(tmp_path))
    passed_on.to(child)  # type: ignore[arg-type]
    passed_on.ranks = tmp_path
    for _ in range(3):
        passed_on._forward(number, None)
    me = str(os.getpid())
    assert sent == [("torchrun", number), (me, number), (me, last)]


def launched_program(monkeypatch: pytest.MonkeyPatch, program: str) -> int:
    def command(verb: str, argv: Any, start: launch.Start) -> list[str]:
        return [sys.executable, "-c", "import os, sys, signal, time\n" + program]

    monkeypatch.setattr(launch, "command", command)
    return launch.launch("train", [], launch.Start(num_processes=2, output_dir="o"), {})


LEAVE = "open(os.environ['COVEY_EXIT_FILE'], 'w').write('{0}'); sys.exit({1})"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 1),
        (LEAVE.format(2, 0), 2),
        (LEAVE.format(3, 0), 3),
        (LEAVE.format(0, 0), 0),
        (LEAVE.format(0, 1), 1),
        # What the first start left, and the second.
        (f"open(os.environ['COVEY_EXIT_FILE'] + '.1', 'w').write('0')\n{LEAVE.format(1, 0)}", 0),
        (LEAVE.format(143, 0), 143),  # the signal came to another machine
        (f"os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)\n{LEAVE.format(0, 0)}", 143),
        ("signal.signal(2, lambda *a: (open(os.environ['COVEY_EXIT_FILE'], 'w').write('130'), os._exit(1)))\n"
         "os.kill(os.getppid(), signal.SIGINT); time.sleep(30)", 130),
        ("assert os.environ['COVEY_OUTPUT_DIR'] == 'o' and os.environ['OMP_NUM_THREADS']", 0),
    ],
)  # fmt: skip
def test_the_exit_code_of_several_processes(monkeypatch: pytest.MonkeyPatch, program: str, code: int) -> None:
    assert launched_program(monkeypatch, program) == code


@pytest.mark.parametrize(
    ("rank", "code", "first_left", "exits", "written"),
    [
        ("0", 2, None, 0, "2"),
        ("0", 3, None, 0, "3"),
        ("0", 0, None, 0, "0"),
        ("0", 143, None, 0, "143"),
        ("1", 130, "130", 0, "130"),
        ("1", 0, None, 0, None),
        ("1", 3, "3", 0, "3"),
        ("1", 3, None, 3, None),
    ],
)
def test_what_a_rank_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, code: int, first_left: str | None, exits: int,
    written: str | None,
) -> None:  # fmt: skip
    path = tmp_path / "exit"
    if first_left is not None:
        path.write_text(first_left)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(ranks.EXIT_FILE, str(path))
    monkeypatch.setattr("covey.exits._PATIENCE_S", 0.0)
    assert ranks.leave(code) == exits
    assert (path.read_text() if path.exists() else None) == written


def test_a_rank_that_did_not_save_leaves_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """143 in that file means that the run saved."""

    def terminated(*_: object, **__: object) -> int:
        raise Terminated

    monkeypatch.setenv(ranks.EXIT_FILE, str(tmp_path / "exit"))
    monkeypatch.setattr("covey.cli.main._answered", terminated)
    assert main(["train", *WORDS]) == 143
    assert not (tmp_path / "exit").exists()


def test_killed_ranks_are_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody else is left to say it."""
    program = (
        "place = os.path.dirname(os.environ['COVEY_EXIT_FILE']) + '/ranks'; os.mkdir(place)\n"
        "open(place + '/rank-0-process', 'w').write('999999999 1')\n"
        "signal.signal(15, lambda *a: os._exit({code}))\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)"
    )
    assert launched_program(monkeypatch, program.format(code=137)) == 1
    said = capsys.readouterr().err
    assert said.startswith("F133") and "rank 0" in said and "SIGTERM" in said
    assert launched_program(monkeypatch, program.format(code=143)) == 143
    assert capsys.readouterr().err == ""


def test_a_rank_speaks_up_where_the_first_one_does_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "exit"
    for name, value in rank_variables(1, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("covey.exits._PATIENCE_S", 0.0)
    assert not ranks.speaks()
    monkeypatch.setenv(ranks.EXIT_FILE, str(path))
    assert ranks.speaks()
    path.write_text("2")
    assert not ranks.speaks()
