"""`covey train` with a vLLM over several processes, against one process with all of vLLM in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faults import rank_run
from support.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.multi]

RUN = (
    "--model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 16 "
    "--per_device_train_batch_size 4 --generation_batch_size 16 --num_generations 4 --use_vllm true "
    "--vllm_mode colocate --vllm_enforce_eager true --max_steps 2"
)
FULL, LORA = "--learning_rate 1e-3", "--learning_rate 1e-2 --tuner_type lora"
# Summed in another order.
SAME_GRADIENT = 1e-5


def start(words: str, output: Path, said: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "covey", "train", *words.split(), "--output_dir", str(output)]
    with said.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=output.parent, env=dict(os.environ)
        )


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def completions(output: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """The records of all rollouts, by which completion it is."""
    files = sorted((output / "rollouts").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(r["rollout"], r["group"], r["sibling"]): r for r in records}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of one process, by what is trained."""
    folder = tmp_path_factory.mktemp("alone")
    outputs = {}
    for number, words in enumerate((FULL, LORA)):
        outputs[words] = folder / f"out-{number}"
        said = folder / f"said-{number}"
        code = start(f"{RUN} {words} --gradient_accumulation_steps 4", outputs[words], said).wait(600)
        assert code == 0, said.read_text()
    return outputs


@pytest.mark.parametrize(
    ("processes", "spans", "split", "words"),
    [
        (2, 2, "", FULL),
        (2, 2, "--fsdp full_shard", LORA),
        (4, 2, "--fsdp full_shard", FULL),
        (2, 1, "", FULL),
    ],
    ids=["two", "two-lora", "four", "apart"],
)
def test_a_run(
    alone: dict[str, Path], tmp_path: Path, processes: int, spans: int, split: str, words: str
) -> None:
    """The same completions, in logprobs as close as rounding, and the same steps: two processes are one
    vLLM, of four there are two of them side by side, or each process has its own."""
    more = f"--nproc_per_node {processes} --gradient_accumulation_steps {4 // processes} {split}"
    said = tmp_path / "said"
    run = start(f"{RUN} {words} {more} --vllm_tensor_parallel_size {spans}", tmp_path / "out", said)
    assert run.wait(900) == 0, said.read_text()
    assert ("2 processes are one vLLM" in " ".join(said.read_text().split())) is (spans == 2)
    expected, found = completions(alone[words]), completions(tmp_path / "out")
    assert found.keys() == expected.keys() and len(found) == 32
    # The first process of each engine owns what it sampled.
    sizes = {f.name.split(".")[1]: f.stat().st_size for f in (tmp_path / "out" / "rollouts").glob("*.jsonl")}
    assert {int(name.split("-")[0]) for name, size in sizes.items() if size} == {*range(0, processes, spans)}
    for key, record in found.items():
        assert record["completion_ids"] == expected[key]["completion_ids"], key
        assert record["sampler_logprobs"] == pytest.approx(expected[key]["sampler_logprobs"], abs=1e-4)
        assert record["versions"] == expected[key]["versions"]
    for own, other in zip(metrics(tmp_path / "out"), metrics(alone[words]), strict=True):
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=SAME_GRADIENT)
        assert own["reward"] == other["reward"]
        assert own["sampling/sampling_logp_difference/mean"] < 1e-4
        assert 0.0 < own["publish/canary_gap"] < 1e-3
        assert own["publish/bytes"] == other["publish/bytes"]
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


def test_sigterm_ends_a_rollout_of_all_processes(tmp_path: Path) -> None:
    """The rollout is dropped at the same step on both, what was trained is saved, and none waits for the
    other."""
    words = (
        "--model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 1800 "
        "--temperature 2 --learning_rate 1e-3 --per_device_train_batch_size 4 --num_generations 4 "
        "--gradient_accumulation_steps 2 --use_vllm true --vllm_mode colocate --vllm_enforce_eager true "
        "--vllm_tensor_parallel_size 2 --nproc_per_node 2 --max_steps 2"
    )
    said = tmp_path / "said"
    run = start(words, tmp_path / "out", said)
    try:
        status = tmp_path / "out" / "status-rank-0.json"
        until = time.monotonic() + 400
        while not (status.exists() and json.loads(status.read_text())["phase"] == "rollout"):
            assert run.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.2)
        time.sleep(3)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 143, said.read_text()
    finally:
        run.kill()
        run.wait()
    assert "dropping this rollout" in said.read_text()
    assert (tmp_path / "out" / "checkpoint-0").is_dir(), said.read_text()


@pytest.mark.parametrize(("fault", "code"), [("raise", "F131"), ("kill", "F133")])
def test_the_first_process_fails_while_the_other_steps_with_it(fault: str, code: str, tmp_path: Path) -> None:
    """The other one does not wait for it: the run ends with one message, and leaves no process."""
    words = (
        "--model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 60 "
        "--per_device_train_batch_size 4 --num_generations 4 --gradient_accumulation_steps 2 "
        "--learning_rate 1e-3 --use_vllm true --vllm_mode colocate --vllm_enforce_eager true "
        "--vllm_tensor_parallel_size 2 --max_steps 2 --output_dir out"
    )
    given = (fault, "completion", "0", "train", *words.split())
    ended = run_ranks(rank_run.__file__, *given, folder=tmp_path, limit_s=400)
    assert ended.code == 1 and ended.seconds < 10 and ended.left == [], ended.said
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == [code], ended.said
    assert "rank 0" in ended.said and "rollout" in ended.said


def test_an_engine_that_does_not_fit_the_processes(tmp_path: Path) -> None:
    """Refused before a weight is read, by the plan too."""
    words = f"{RUN} {FULL} --nproc_per_node 3 --gradient_accumulation_steps 1 --generation_batch_size 12"
    for verb in ("train", "plan"):
        command = [sys.executable, "-m", "covey", verb, *words.split(), "--vllm_tensor_parallel_size", "2"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 2 and "E214 vllm_tensor_parallel_size" in done.stderr, done.stderr
        assert "3 processes" in done.stderr
