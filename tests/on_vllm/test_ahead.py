"""Runs whose rollouts a vLLM server samples while the model trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.telemetry.rollouts import read_rollouts
from on_vllm import ahead_program

pytestmark = pytest.mark.vllm

STEPS = 4
REWARD = """
def judge(completions, **kwargs):
    return [float(sum(map(ord, str(c))) % 7) for c in completions]
"""
# At this temperature completions seldom end before their limit.
TRAIN = (
    "train --model quickstart --dataset quickstart#64 --reward_funcs mine.py:judge --temperature 2 "
    "--max_completion_length 96 --learning_rate 3e-3 --per_device_train_batch_size 8 --num_generations 4 "
    f"--gradient_accumulation_steps 1 --torch_dtype float32 --reward_trial false --max_steps {STEPS} "
    "--max_staleness 1 --rollout_token_file t.token --output_dir out"
)
ROLLOUT = (
    "rollout --model quickstart --engine vllm --port 0 --vllm_max_model_len 256 --max_rows 8 --dtype float32 "
    "--vllm_enforce_eager true --token_file t.token --end_with_run true"
)
CLOSE = 1e-4


@contextmanager
def served(folder: Path, kind: str, more: str) -> Iterator[str]:
    """The address of a server; it ends with its run, by itself."""
    log = folder / "server.log"
    with log.open("w") as out:
        command = [sys.executable, ahead_program.__file__, kind, *ROLLOUT.split(), *more.split()]
        server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 300
        while "ready " not in log.read_text():
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield log.read_text().split("ready ")[1].split()[0]
        assert server.wait(60) == 0, log.read_text()
    finally:
        server.kill()


def trained(
    folder: Path, kind: str = "usual", of_server: str = "", of_run: str = ""
) -> subprocess.CompletedProcess[str]:
    """A run on such a server."""
    (folder / "mine.py").write_text(REWARD)
    with served(folder, kind, of_server) as address:
        words = [*TRAIN.split(), *of_run.split(), "--rollout_servers", address]
        command = [sys.executable, "-m", "covey", *words]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def versions(folder: Path) -> list[list[list[int]]]:
    """The versions of the tokens of each completion, rollout by rollout."""
    return [[r["versions"] for r in records] for _, records in read_rollouts(folder / "out" / "rollouts")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def assert_close(folder: Path) -> None:
    """Every rollout is there, none of its tokens too old, and those of the version that learns from them are
    the learner's."""
    found = metrics(folder)
    assert [m["step"] for m in found] == list(range(1, STEPS + 1))
    for number, (record, rows) in enumerate(zip(found, versions(folder), strict=True)):
        assert len(rows) == 8 and all(rows)
        assert all(max(0, number - 1) <= v <= number for row in rows for v in row)
        assert all(row == sorted(row) for row in rows)
        assert record["age/max"] <= 1.0 and record["publish/canary_gap"] < 1e-3
    compared = [m for m in found if m["sampling/logprob_max_gap"] is not None]
    assert len(compared) > 1
    for name in ("sampling/sampling_logp_difference/mean", "sampling/logprob_max_gap"):
        assert max(m[name] for m in compared) < CLOSE, [m[name] for m in compared]


def is_mixed(row: list[int]) -> bool:
    return len(set(row)) > 1


@pytest.mark.parametrize("of_run", ["", "--tuner_type lora --lora_rank 8"], ids=["whole", "adapter"])
def test_what_runs_goes_on_with_the_new_weights(of_run: str, tmp_path: Path) -> None:
    """Versions change in the middle of completions; vLLM computes their keys and values again. Adapters are
    sent merged."""
    done = trained(tmp_path, of_run=of_run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(tmp_path)
    assert any(is_mixed(row) for rows in versions(tmp_path) for row in rows)
    assert max(m["age/max"] for m in metrics(tmp_path)) == 1.0


def test_a_cache_that_is_kept_is_named(tmp_path: Path) -> None:
    done = trained(tmp_path, "keeps")
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.findall(r"^([EF]\d{3}) ", done.stderr, re.MULTILINE) == ["F115"], done.stderr
    assert any(is_mixed(row) for row in versions(tmp_path)[-1])


def test_where_vllm_takes_none_meanwhile_what_runs_is_sampled_again(tmp_path: Path) -> None:
    """Its workers are processes of their own."""
    done = trained(tmp_path, of_server="--vllm_tensor_parallel_size 2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(tmp_path)
    assert not any(is_mixed(row) for rows in versions(tmp_path) for row in rows)
    assert "W180" not in (tmp_path / "out" / "events.jsonl").read_text()
