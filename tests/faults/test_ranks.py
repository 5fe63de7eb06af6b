"""A rank that is killed, stopped, raises or runs out of memory, in every phase: the run ends within seconds
with one message that names it, leaves no process, and goes on from its checkpoint to the same bits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from covey.checkpoint.read import verify
from covey.telemetry.rollouts import list_rollouts, read_rollouts
from faults import rank_run
from support.ranks import Ended, run_ranks

pytestmark = pytest.mark.multi

REWARD = """
def judge(completions, solution, **kwargs):
    return [float(sum(map(ord, str(c))) % 7) for c in completions]
"""
# What runs with another backend gets beside these words.
BACKENDS: dict[str, list[str]] = {
    "ddp": [],
    "fsdp2": ["--fsdp", "full_shard"],
    "zero3": ["--deepspeed", "zero3"],
}
WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy", "mine.py:judge"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "16", "--learning_rate", "1e-4"),
    *("--num_generations", "4", "--reward_trial", "false", "--beta", "0.02"),
    *("--max_steps", "4", "--save_steps", "2", "--output_dir", "run", "--resume_from_checkpoint", "auto"),
]
NAMES = {"kill": "F133", "stop": "F134", "raise": "F131", "memory": "F135"}
CODES = {"kill": 1, "stop": 3, "raise": 1, "memory": 1}
# Seconds from the first process that fails to the end of the last one.
DEADLINE_S = 8.0
# A checkpoint cut short, a rank that ends in the middle of a step, and a run that had not begun.
RESUMED = (("kill", "save"), ("memory", "update"), ("raise", "load"))
PHASES = ("process group", "load", "rollout", "reward", "annotate", "update", "publish", "save")


def run(folder: Path, backend: str, *fault: str) -> Ended:
    """A run of four steps, which begins at its newest checkpoint."""
    (folder / "mine.py").write_text(REWARD)
    planted = fault or ("none", "none", "0")
    return run_ranks(rank_run.__file__, *planted, "train", *WORDS, *BACKENDS[backend], folder=folder)


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(str(file)).items()
    }


def assert_same_tensors(actual: Path, expected: Path, step: int) -> None:
    """The same tensors to the bit, of two runs whose processes have other numbers that nothing draws from."""
    ours, theirs = (tensors(run / f"checkpoint-{step}") for run in (actual, expected))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


def assert_same(actual: Path, expected: Path, step: int) -> None:
    """The same checkpoint to the bit, and the same records up to it, without what a clock says."""
    assert_same_tensors(actual, expected, step)
    states = [(run / f"checkpoint-{step}/trainer/state.json").read_text() for run in (actual, expected)]
    assert states[0] == states[1]


USUAL = {
    "ddp": {
        *(("kill", "process group"), ("kill", "annotate"), ("kill", "save"), ("stop", "load")),
        *(("stop", "rollout"), ("raise", "reward"), ("raise", "load"), ("memory", "update")),
        ("raise", "publish"),
    },
    "fsdp2": {("kill", "update"), ("memory", "update")},
    "zero3": {("kill", "update"), ("stop", "update")},
}
"""What the usual run of the tests has: with DDP each fault and each phase."""


def cases() -> list[Any]:
    """Every fault in every phase on every backend."""
    return [
        pytest.param(name, fault, phase, marks=[] if (fault, phase) in USUAL[name] else [pytest.mark.slow])
        for name in BACKENDS
        for fault in NAMES
        for phase in PHASES
    ]


@pytest.mark.parametrize(("backend", "fault", "phase"), cases())
def test_a_fault_of_one_rank(
    backend: str, fault: str, phase: str, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    # Of a checkpoint rank 0 is the one that seals it.
    rank = "0" if phase == "save" else "1"
    ended = run(tmp_path, backend, fault, phase, rank)
    assert ended.code == CODES[fault], ended.said
    assert ended.seconds < DEADLINE_S and ended.left == []
    said = re.findall(r"^(E\d{3}|F13\d|F30\d) ", ended.said, re.MULTILINE)
    assert said == [NAMES[fault]], ended.said
    assert f"rank {rank}" in " ".join(ended.said.split())
    out = tmp_path / "run"
    begun = phase not in ("process group", "load")
    if begun:
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        assert [e["code"] for e in events if e["kind"] == "finding" and e["code"] in NAMES.values()] == said
        assert verify(out / "checkpoint-2").trainer
    if (fault, phase) in RESUMED:
        again = run(tmp_path, backend)
        assert again.code == 0, again.said
        assert_same(out, undisturbed(backend), 4)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_cannot_write_its_part_of_a_rollout(rank: str, tmp_path: Path) -> None:
    """The other one has written its part, which the resume puts aside."""
    ended = run(tmp_path, "ddp", "full", "record", rank)
    assert ended.code == 3, ended.said
    assert ended.seconds < DEADLINE_S and ended.left == []
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == ["F130"], ended.said
    assert "run/rollouts/a-file" in ended.said
    rollouts, written = tmp_path / "run" / "rollouts", f"rollout-000002.{1 - int(rank)}-of-2.jsonl"
    assert list_rollouts(rollouts)[2].paths == (rollouts / written,)
    again = run(tmp_path, "ddp")
    assert again.code == 0, again.said
    assert [len(records) for _, records in read_rollouts(rollouts)] == [16] * 4
    assert (tmp_path / "run" / "superseded" / "1" / "rollouts" / written).exists()


@pytest.mark.parametrize(
    ("fault", "rank", "code", "says"),
    [
        ("version", "1", "E378", "Rank 1: transformers 5.17.0; rank 0: 5."),
        ("data", "1", "E302", "d.jsonl"),
        pytest.param("data", "0", "E302", "d.jsonl", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_do_not_agree(fault: str, rank: str, code: str, says: str, tmp_path: Path) -> None:
    """Before weights load: one message, exit code 2, nothing written; also where one rank alone finds
    something wrong and the other waits for it."""
    ended = run(tmp_path, "ddp", fault, "", rank)
    assert ended.code == 2, ended.said
    assert ended.seconds < 20 and ended.left == []
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == [code], ended.said
    assert says in " ".join(ended.said.split())
    assert not (tmp_path / "run").exists()
