"""A run over two machines, a rank on each: it is the run of one machine, and a rank that is killed, stopped
or refused ends both within seconds, named with its host."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.checkpoint.read import verify
from covey.cli.listening import processes_below
from covey.meeting import is_stopped
from faults import rank_run
from faults.test_ranks import REWARD, WORDS, assert_same_tensors, run
from support.machines import Machine, torchrun, two_machines, wait_for

pytestmark = pytest.mark.multi

LIMIT_S = 150.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def start_two(
    nodes: tuple[Machine, Machine], folder: Path, *fault: str
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """The run of tests/faults/test_ranks.py with a rank on each machine, which torchrun starts, and the files
    of what each says."""
    (folder / "mine.py").write_text(REWARD)
    said = [folder / f"said-{number}" for number in range(2)]
    script = (rank_run.__file__, *fault, "train", *WORDS)
    path = {"PYTHONPATH": str(Path(rank_run.__file__).parents[1]), "COVEY_TEST_STOPPED_S": "9"}
    started = [
        node.start(torchrun(number, nodes[0], *script), folder, said[number], path)
        for number, node in enumerate(nodes)
    ]
    return started, said


def codes_said(text: str) -> list[str]:
    return re.findall(r"^([EF]\d{3}) ", text, re.MULTILINE)


def test_two_machines_are_one_run(nodes: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Started as ms-swift starts it; the same bits as two processes of one machine."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run(tmp_path / "one", "ddp")
    assert one.code == 0, one.said
    folder = tmp_path / "two"
    (folder / "mine.py").write_text(REWARD)
    said = [folder / f"said-{number}" for number in range(2)]
    asked = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29519"}
    started = [
        node.start(
            [sys.executable, "-m", "covey", "train", *WORDS],
            folder,
            said[number],
            {**asked, "NODE_RANK": str(number)},
        )
        for number, node in enumerate(nodes)
    ]
    codes, texts, _ = wait_for(started, said, LIMIT_S)
    assert codes == [0, 0], texts
    # One voice: the table of steps is printed on the first machine alone.
    assert "step" in texts[0] and "reward" not in texts[1]
    assert_same_tensors(folder / "run", tmp_path / "one" / "run", 4)
    assert verify(folder / "run" / "checkpoint-4").trainer


@pytest.mark.parametrize(
    ("fault", "phase", "rank", "name"),
    [
        ("kill", "update", "1", "F133"),
        # Rank 0 keeps the lock, and its machine torchrun's store.
        pytest.param("kill", "rollout", "0", "F133", marks=pytest.mark.slow),
        pytest.param("raise", "reward", "1", "F131", marks=pytest.mark.slow),
    ],
)
def test_a_fault_on_one_machine_ends_both(
    nodes: tuple[Machine, Machine], tmp_path: Path, fault: str, phase: str, rank: str, name: str
) -> None:
    codes, texts, ended = wait_for(*start_two(nodes, tmp_path, fault, phase, rank), LIMIT_S)
    assert codes == [1, 1], texts
    assert abs(ended[0] - ended[1]) < 15
    # The message in full once, and who says it names rank and host.
    assert sorted(codes_said(texts[0]) + codes_said(texts[1])) == [name], texts
    words = " ".join("".join(texts).split())
    assert re.search(rf"rank {rank} (of 2 )?on node{int(rank) + 1}", words), words
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["code"] for e in events if e["kind"] == "finding" and e["code"] == name] == [name]


def test_a_signal_on_one_machine_saves_on_both(nodes: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Each machine's command ends with 143, the one that was sent nothing too, and nothing starts again."""
    (tmp_path / "mine.py").write_text(REWARD)
    said = [tmp_path / f"said-{number}" for number in range(2)]
    asked = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29521"}
    words = [*WORDS, "--max_steps", "2000", "--save_steps", "2000", "--max_restarts", "1"]
    started = [
        node.start(
            [sys.executable, "-m", "covey", "train", *words],
            tmp_path,
            said[number],
            {**asked, "NODE_RANK": str(number)},
        )
        for number, node in enumerate(nodes)
    ]
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + LIMIT_S
    while not metrics.is_file() or metrics.read_text().count("\n") < 2:
        assert started[0].poll() is None and time.monotonic() < until, said[0].read_text(errors="replace")
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    codes, texts, _ = wait_for(started, said, LIMIT_S)
    assert codes == [143, 143], texts
    assert verify(max((tmp_path / "run").glob("checkpoint-*"))).trainer
    assert not any("Traceback" in text or "restart 1" in text for text in texts), texts


@pytest.mark.slow
def test_a_machine_that_is_stopped(nodes: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Its only rank cannot be ended from another machine; it ends as soon as it goes on."""
    started, said = start_two(nodes, tmp_path, "stop", "rollout", "1")
    until = time.monotonic() + LIMIT_S
    while started[0].poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    text = " ".join(said[0].read_text(errors="replace").split())
    assert codes_said(said[0].read_text(errors="replace")) == ["F136"], text
    assert "rank 1 on node2 gave no sign" in text
    # The rank on the second machine, a child of its agent, is stopped still.
    for process in filter(is_stopped, processes_below(started[1].pid)):
        os.kill(process, signal.SIGCONT)
    codes, texts, _ = wait_for(started, said, 30)
    assert codes[0] != 0 and codes[1] != 0, texts


@pytest.mark.parametrize("rank", [pytest.param("1", marks=pytest.mark.slow), "0"])
def test_what_one_machine_alone_is_refused(nodes: tuple[Machine, Machine], tmp_path: Path, rank: str) -> None:
    """Before weights load: the other machine, which waits for it, ends too, with the same exit code."""
    codes, texts, ended = wait_for(*start_two(nodes, tmp_path, "data", "", rank), LIMIT_S)
    assert abs(ended[0] - ended[1]) < 25
    own, other = texts[int(rank)], texts[1 - int(rank)]
    assert codes_said(own) == ["E302"], texts
    assert codes_said(other) == [] and f"rank {rank} on node{int(rank) + 1}" in other, other
    assert not (tmp_path / "run").exists()
    assert all(code != 0 for code in codes), (codes, texts)
