"""A machine or a directory that the run does not fit on, and several faults in one command."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from covey.checks.run import look as run
from covey.telemetry.kept_files import write_sets
from covey.types import KeptSets
from faults.case import SUMS, Case, words


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _full_disk(patch: pytest.MonkeyPatch, here: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 10**9 - 5 * 10**6, 5 * 10**6))


def _small_disk(patch: pytest.MonkeyPatch, here: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 10**9 - 2 * 10**7, 2 * 10**7))


def _little_memory(patch: pytest.MonkeyPatch, here: Path) -> None:
    """A machine with 10 MB to have."""
    patch.setattr(run, "free_memory", lambda **_: 10**7)


# A record as far as its kept sets go: two tokens were drawn.
FILTERED = '{"completion_ids": [5, 7], "trained_mask": [1, 1], "kept_checksum": 0}\n'


def _other_sets(here: Path) -> None:
    """The second set lacks the token 7."""
    write_sets(here / "rollouts/rollout-000000.jsonl", KeptSets.of([[5], [6, 8]], 300))


def _no_wandb(patch: pytest.MonkeyPatch, here: Path) -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "wandb" else real(name, package)

    patch.setattr(importlib.util, "find_spec", find)


def _gpus(patch: pytest.MonkeyPatch, here: Path) -> None:
    patch.setattr(run, "num_gpus", lambda: 2)


def _old_gpu(patch: pytest.MonkeyPatch, here: Path) -> None:
    """A GPU of 2018, by what its tool says."""
    tool = here / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 7.5\n")
    tool.chmod(0o755)
    patch.setenv("PATH", str(tool.parent), prepend=":")
    patch.setattr(run, "num_gpus", lambda: 1)


def _accelerate(patch: pytest.MonkeyPatch, here: Path) -> None:
    """What `accelerate launch` sets for a file with Megatron-LM, float16 and a compiler."""
    patch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    patch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    patch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")


_RUN = {"run/config.yaml": "seed: 1\n", "run/metrics.jsonl": "{}\n"}

CASES = (
    Case(name="dtype_not_trained_in", words=words("--torch_dtype float16")),
    Case(name="dtype_that_the_gpu_lacks", words=words("--torch_dtype bfloat16"), edge=_old_gpu),
    Case(name="more_processes_than_gpus", words=words("--nproc_per_node 4"), edge=_gpus),
    Case(name="settings_of_accelerate", words=words(), edge=_accelerate),
    Case(name="package_missing", words=words("--report_to wandb"), edge=_no_wandb),
    Case(
        name="memory_too_small",
        words=words(),
        edge=_little_memory,
    ),
    Case(name="disk_too_small", words=words("--save_total_limit 3"), edge=_small_disk),
    Case(name="disk_full", words=words(), edge=_full_disk),
    Case(name="output_holds_a_run", words=words("--output_dir run"), files=_RUN),
    Case(name="output_holds_files", words=words("--output_dir photos"), files={"photos/a.txt": "mine"}),
    Case(name="output_cannot_be_written", words=words("--output_dir file/run"), files={"file": "mine"}),
    Case(name="output_is_a_file", words=words("--output_dir file"), files={"file": "mine"}),
    Case(name="resume_from_nothing", words=words("--resume_from_checkpoint latest --output_dir run")),
    Case(
        name="resume_from_a_folder",
        words=words("--resume_from_checkpoint folder --output_dir run"),
        files={"folder/notes.txt": "mine"},
    ),
    Case(name="replay_of_nothing", words=words("--replay_rollouts rollouts")),
    Case(
        name="replay_without_the_file_of_a_rank",
        words=words("--replay_rollouts rollouts"),
        files={f"rollouts/rollout-000000.{rank}-of-4.jsonl": "{}\n" for rank in (0, 1, 3)},
    ),
    Case(
        name="replay_of_a_torn_file",
        words=words("--replay_rollouts rollouts"),
        files={
            "rollouts/rollout-000000.0-of-2.jsonl": "{}\n",
            "rollouts/rollout-000000.1-of-2.jsonl": '{}\n{"group": 4, "sib',
        },
    ),
    Case(
        name="replay_without_kept_sets",
        words=words("--replay_rollouts rollouts"),
        files={"rollouts/rollout-000000.jsonl": FILTERED},
    ),
    Case(
        name="replay_of_kept_sets_of_other_tokens",
        words=words("--replay_rollouts rollouts"),
        files={"rollouts/rollout-000000.jsonl": FILTERED},
        make=_other_sets,
    ),
    Case(
        name="everything_at_once",
        words="train --model nowhere/at/all --dataset 缺失.jsonl --reward_funcs acuracy mine.py:reward "
        "--reward_weights 1 --num_generations 1 --temperature 0 --learning_rte 1e-5 --deepspeed zero3 "
        "--beta abc --output_dir photos",
        files={"photos/a.txt": "mine"},
    ),
    Case(
        name="model_data_and_batch_at_once",
        words=words(
            "--per_device_train_batch_size 3 --num_generations 4 --torch_dtype float16",
            model="./model",
            dataset="rows.jsonl",
        ),
        files={"rows.jsonl": SUMS},
    ),
)
