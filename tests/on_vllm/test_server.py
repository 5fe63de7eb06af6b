"""A run that samples on `covey rollout --engine vllm`, by TRL's and ms-swift's names for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

TRAIN = (
    "train --model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 16 "
    "--learning_rate 1e-3 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 3 "
    "--num_generations 4 --use_vllm true --vllm_mode server --rollout_token_file t.token --output_dir out"
)
ROLLOUT = (
    "rollout --model quickstart --engine vllm --port 0 --vllm_max_model_len 256 --max_rows 64 "
    "--vllm_enforce_eager true --token_file t.token --end_with_run true"
)


GROUP = "--vllm_server_group_port 5123"
ALONE = "--vllm_enable_lora true --vllm_max_lora_rank 8"


@pytest.mark.parametrize(
    ("of_server", "of_run"),
    [
        ("", ""),
        ("", f"{GROUP}0 --top_p 0.9 --top_k 50"),
        (ALONE, "--tuner_type lora --lora_rank 8"),
        (ALONE, f"--tuner_type lora --lora_rank 8 {GROUP}1"),
        ("", "--tuner_type lora --lora_rank 8"),
        ("--vllm_tensor_parallel_size 2", f"{GROUP}2"),
    ],
    ids=["full", "full-group-filters", "adapter", "adapter-group", "merged", "workers-group"],
)
def test_a_run(tmp_path: Path, of_server: str, of_run: str) -> None:
    """An adapter is sent alone, after its base, to a server that applies it, or added to the weights."""
    log = tmp_path / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "covey", *ROLLOUT.split(), *of_server.split()],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
        )
    try:
        until = time.monotonic() + 300
        while "ready " not in log.read_text():
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        address = log.read_text().split("ready ")[1].split()[0]
        words = [*TRAIN.split(), *of_run.split(), "--vllm_server_base_url", address]
        done = subprocess.run(
            [sys.executable, "-m", "covey", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
        assert server.wait(60) == 0
    finally:
        server.kill()
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert "W183" not in (tmp_path / "out" / "events.jsonl").read_text()
    assert max(m["publish/canary_gap"] for m in steps if m["publish/canary_gap"] is not None) < 1e-3
    if "--top_k" in of_run:
        assert all(1.0 < m["kept/mean"] <= 50.0 for m in steps)
        assert steps[0]["entropy_kept"] < steps[0]["entropy"]
        assert steps[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    first, *later = [m["publish/bytes"] for m in steps if m["publish/bytes"]]
    assert len(later) == 2
    assert all(b < first / 2 for b in later) if of_server == ALONE else {*later} == {first}
