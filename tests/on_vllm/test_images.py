"""Prompts with images on vLLM: the logprobs of the learner, what a publish leaves behind, and each fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.image_runs import REWARD, image_rows
from support.vision import FAMILIES, save_model
from support.vllm_images import image_environment

pytestmark = pytest.mark.vllm

# Of float32 on both sides; the faults below are a thousand times and more.
CLOSE, FAR = 1e-4, 0.1
PROGRAM = Path(__file__).with_name("images_program.py")


@pytest.fixture(scope="module", params=FAMILIES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a small model of each family saw."""
    path = tmp_path_factory.mktemp("images") / "found.json"
    done = process([str(PROGRAM), request.param, str(path)])
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(path.read_text())


def process(words: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=image_environment(),
        timeout=900,
    )


def test_logprobs_are_those_of_the_learner(found: dict[str, Any]) -> None:
    """For one image, for several, and without any; from the caches, too. With another image they are not."""
    own = found["all"]
    assert 0 < own["gap"] < CLOSE and own["without"] < CLOSE
    again, is_same = own["again"]
    assert again < CLOSE and is_same
    assert own["swapped"] > FAR


def test_prompts_that_differ_in_an_image_alone_share_nothing(found: dict[str, Any]) -> None:
    """Were the keys of two images equal, they would."""
    assert found["all"]["one text"] < CLOSE and found["all"]["mistaken"] > FAR


def test_a_publish_is_read_back_under_the_names_that_were_sent(found: dict[str, Any]) -> None:
    for name in ("first", "second"):
        own = found["all"][name]
        assert own["agrees"] and own["read"] >= 18 and own["unread biases"] == 0


def test_another_vision_tower_is_seen_at_once(found: dict[str, Any]) -> None:
    """By requests that run meanwhile, too. Where features of the former one are kept, vLLM does not go on."""
    own = found["all"]
    assert own["former tower"] > FAR
    assert own["gap of the second"] < CLOSE and own["while running"] < CLOSE
    stale = own["stale"]
    assert "Encoder cache miss" in stale if isinstance(stale, str) else stale > FAR


def test_an_adapter_is_applied_and_read_back(found: dict[str, Any]) -> None:
    own = found["adapter"]
    assert own["agrees"] and own["read"] == own["matrices"] == 42 and own["gap"] < CLOSE


def test_a_vllm_that_normalizes_pixels_again_is_refused(found: dict[str, Any]) -> None:
    assert found["raw"] == "vLLM would normalize the pixels of images a second time."


RUN = (
    "rlhf --rlhf_type grpo --model MODEL --dataset ROWS --reward_funcs mixed.py:mixed --reward_trial false "
    "--max_steps 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 4 "
    "--max_completion_length 6 --learning_rate 1e-3 --torch_dtype float32 --use_vllm true --vllm_mode "
    """colocate --vllm_enforce_eager true --vllm_limit_mm_per_prompt {"image":2} --loss_type grpo"""
)
GAP = "sampling/sampling_logp_difference/mean"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_5_vl", "--tuner_type full"),
        ("qwen3_vl", "--tuner_type lora"),
        ("qwen2_vl", "--tuner_type lora --freeze_vit false --freeze_aligner false"),
        ("qwen2_5_vl", "--tuner_type full --nproc_per_node 2 --vllm_tensor_parallel_size 2"),
    ],
    ids=["full", "lora", "merged", "two"],
)
def test_a_run(tmp_path: Path, family: str, options: str) -> None:
    """Rows with images in files and within them, and rows without. Two processes may be one vLLM."""
    model = save_model(family, tmp_path / "model", head=32)
    rows = image_rows(tmp_path, prompts=6)
    (tmp_path / "mixed.py").write_text(REWARD)
    words = RUN.replace("MODEL", str(model)).replace("ROWS", str(rows)).split()
    words = ["-m", "covey", *words, *options.split(), "--output_dir", str(tmp_path / "out")]
    done = process(words, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "engine    vLLM 0.32" in done.stdout
    first, second = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    for own in (first, second):
        assert 0 <= own[GAP] < 1e-5 and 0 < own["publish/canary_gap"] < CLOSE
        assert own["clip_ratio/region_mean"] == 0 and own["grad_norm"] > 0
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert {e["severity"] for e in events if e["kind"] == "finding"} <= {"warning"}
