"""`covey train` with vLLM in the training process, as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.models import save_padded

pytestmark = pytest.mark.vllm

RUN = (
    "--model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 16 "
    "--learning_rate 1e-4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    "--num_generations 4 --use_vllm true --vllm_mode colocate --vllm_enforce_eager true"
)


def covey(words: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Run a verb with an output directory."""
    command = [sys.executable, "-m", "covey", *words.split(), "--output_dir", str(output)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=output.parent, env=dict(os.environ), timeout=900
    )


def largest(name: str, output: Path) -> float:
    """Of a metric over all steps that have it, of which there is one at least."""
    return max(m[name] for m in metrics(output) if m[name] is not None)


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def records(output: Path) -> list[dict[str, Any]]:
    """Every completion of the run."""
    paths = sorted((output / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


GAP = "sampling/sampling_logp_difference/mean"


LORA = "--tuner_type lora --learning_rate 1e-2"
MERGED = f"{LORA} --vllm_enable_lora false"


@pytest.mark.parametrize("options", ["--learning_rate 1e-3", LORA, MERGED], ids=["full", "lora", "merged"])
def test_a_run(tmp_path: Path, options: str) -> None:
    """Each rollout is of the weights of its step: the engine's log-probabilities are the learner's. After the
    first publish an adapter is sent alone, where it is not added to the weights."""
    done = covey(f"train {RUN} --max_steps 4 {options}", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine    vLLM 0.32" in done.stdout
    assert ("and adapters up to rank 16" in " ".join(done.stdout.split())) is (options == LORA)
    first, *later = [m["publish/bytes"] for m in metrics(tmp_path / "out")]
    assert all(0 < b < first / 2 for b in later) if options == LORA else {*later} == {first}
    found = metrics(tmp_path / "out")
    assert [m["step"] for m in found] == [1, 2, 3, 4]
    assert largest(GAP, tmp_path / "out") < 1e-4
    assert 0.0 < largest("publish/canary_gap", tmp_path / "out") < 1e-3
    assert largest("grad_norm", tmp_path / "out") > 0.0
    assert len(records(tmp_path / "out")) == 4 * 16


def test_a_resumed_run_and_an_evaluation(tmp_path: Path) -> None:
    words = f"train {RUN} --save_steps 2 --val_dataset quickstart#8 --eval_steps 2 --eval_temperature 0"
    first = covey(f"{words} --max_steps 2", tmp_path / "out")
    assert first.returncode == 0, first.stdout + first.stderr
    again = covey(f"{words} --max_steps 4 --resume_from_checkpoint latest", tmp_path / "out")
    assert again.returncode == 0, again.stdout + again.stderr
    found = metrics(tmp_path / "out")
    assert [m["step"] for m in found] == [1, 2, 3, 4]
    assert largest(GAP, tmp_path / "out") < 1e-4


def test_a_command_of_ms_swift(tmp_path: Path) -> None:
    words = (
        "rlhf --rlhf_type grpo --model quickstart --train_type full --dataset quickstart#64 --reward_funcs "
        "accuracy --torch_dtype float32 --max_completion_length 16 --num_generations 4 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_steps 2 --use_vllm true "
        "--vllm_mode colocate --vllm_max_model_len 2048 --vllm_gpu_memory_utilization 0.8 --sleep_level 0"
    )
    done = covey(words, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "W108" in done.stdout and "up to 2048 tokens" in done.stdout
    assert largest(GAP, tmp_path / "out") < 1e-4


def test_ids_that_the_tokenizer_does_not_have_are_said(tmp_path: Path) -> None:
    """vLLM samples them as the other engines do."""
    words = RUN.replace("--model quickstart", f"--model {save_padded(tmp_path / 'padded')}")
    done = covey(f"train {words} --max_steps 1", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [i for record in records(tmp_path / "out") for i in record["completion_ids"]]
    (step,) = metrics(tmp_path / "out")
    assert step["completions/unknown_ids_ratio"] == sum(i >= 320 for i in ids) / len(ids) > 0.001
    assert "F233" in done.stdout + done.stderr
