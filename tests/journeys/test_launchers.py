"""Two processes of one run, started by each launcher that a cluster may have: the same run each time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from journeys.helpers import flags, metrics, rows, small, tensors, write_jsonl
from support.machines import plain_environment
from support.processes import _free_port

pytestmark = pytest.mark.multi

COVEY = [sys.executable, "-m", "covey"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


def options(output_dir: str) -> dict[str, object]:
    return small("d.jsonl", output_dir, max_steps=1, save_steps=1, per_device_train_batch_size=4)


def run(folder: Path, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Run commands at a time, each with variables of its own; all of them end well."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = [
        subprocess.Popen(
            list(words), cwd=folder, env={**plain_environment(), **own, **said}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for words, said in commands
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(texts)


def of_srun(rank: int) -> dict[str, str]:
    """What Slurm tells a task of two on one node."""
    job = {"SLURM_JOB_ID": str(_JOB), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n[1]"}
    return {**job, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def of_deepspeed(rank: int, port: int) -> dict[str, str]:
    """What DeepSpeed's launcher tells a process of two."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "CROSS_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CROSS_RANK": 0}
    return {name: str(value) for name, value in {**numbers, **address}.items()}


# A job whose port follows from it; that of another run of the tests is another one.
_JOB = _free_port()


def commands_of(launcher: str, words: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    port = _free_port()
    match launcher:
        case "srun":
            return [([*COVEY, "train", *words], of_srun(rank)) for rank in range(2)]
        case "deepspeed":
            return [
                ([*COVEY, f"--local_rank={rank}", "train", *words], of_deepspeed(rank, port))
                for rank in range(2)
            ]
        case "accelerate":
            accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
            two = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
            two += ["--dynamo_backend", "no", "--main_process_port", str(port)]
            return [([*accelerate, *two, "-m", "covey", "train", *words], {})]
        case _:
            return [([*TORCHRUN, "--master_port", str(port), "-m", "covey", "train", *words], {})]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as covey starts it, with ms-swift's variable."""
    folder = tmp_path_factory.mktemp("expected")
    write_jsonl(folder / "d.jsonl", rows(12))
    run(folder, [([*COVEY, "train", *flags(options("it"))], {"NPROC_PER_NODE": "2"})])
    return folder / "it"


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        "deepspeed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "srun")),
    ],
)
def test_every_launcher_starts_the_same_run(launcher: str, expected: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", rows(12))
    run(tmp_path, commands_of(launcher, flags(options("it"))))
    assert [m["step"] for m in metrics(tmp_path / "it")] == [1]
    ours, theirs = (tensors(path / "checkpoint-1") for path in (tmp_path / "it", expected))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


# What `accelerate launch` sets for the file zero3.yaml of TRL.
ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}


# It first makes the arguments of another trainer, which set up a process group and ZeRO-3 of their own.
PROGRAM = """
from transformers import TrainingArguments

from covey import train

arguments = TrainingArguments("it", use_cpu=True)
train(**{options!r})
"""


def test_a_file_of_accelerate_shards(tmp_path: Path) -> None:
    """A Python program, as most are that accelerate starts."""
    write_jsonl(tmp_path / "d.jsonl", rows(12))
    (tmp_path / "program.py").write_text(PROGRAM.format(options=options("it")))
    run(tmp_path, [([*TORCHRUN, "--master_port", str(_free_port()), "program.py"], ZERO3)])
    lines = (tmp_path / "it" / "config.yaml").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("  deepspeed: "))
    assert line == ("  deepspeed: zero3  # environment of accelerate launch: ACCELERATE_DEEPSPEED_ZERO_STAGE")
