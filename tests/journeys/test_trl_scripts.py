"""Scripts as TRL's users write them, with imports from covey.trl: each is started as a user starts it, in a
directory where the names of a hub are directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from covey.quickstart import task, tools_task
from journeys.helpers import read_lines, write_jsonl
from support.reward_models import write_reward_model

SCRIPTS = Path(__file__).parent / "trl_scripts"
ADDING, CALLING = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B"
# So that `load_dataset(DIRECTORY, "main")` finds a configuration of this name.
NAMED = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"What is {n}+{n + 1}?"} for n in range(16)])


def model(name: str) -> None:
    shutil.copytree(tools_task.MODEL_DIR if name == CALLING else task.MODEL_DIR, name)


def start(script: str, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": "cache",
    }
    command = [sys.executable, *launcher, str(SCRIPTS / script), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def run(script: str, *words: str, **options: Any) -> str:
    """What a script prints that succeeds."""
    done = start(script, *words, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def lines(*path: str) -> list[dict[str, Any]]:
    return read_lines(Path(*path))


def test_word_problems() -> None:
    model("Qwen/Qwen2.5-1.5B-Instruct")
    Path("openai/gsm8k").mkdir(parents=True)
    Path("openai/gsm8k/README.md").write_text(NAMED)
    pairs = task.training_pairs()[:8]
    rows = [{"question": f"What is {a}+{b}?", "answer": f"So.\n#### {a + b}"} for a, b in pairs]
    write_jsonl(Path("openai/gsm8k/train.jsonl"), rows)
    out = run("gsm8k.py")
    # The reward prints what it sees, in the process of the script.
    assert out.count("Question: What is") >= 4 and f"Gold: {sum(pairs[0])}" in out
    adapter = load_file("outputs/final/adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert len(lines("outputs/Qwen-1.5B-GRPO", "metrics.jsonl")) == 4


RECIPE = {
    "model_name_or_path": ADDING,
    "model_revision": "main",
    "dtype": "bfloat16",
    "dataset_name": "sums",
    "system_prompt": "Think, then answer.",
    "bf16": True,
    "do_eval": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "hub_model_id": "me/sums",
    "push_to_hub": False,
    "learning_rate": 1e-3,
    "log_level": "warning",
    "logging_steps": 1,
    "lr_scheduler_type": "cosine",
    "max_completion_length": 12,
    "max_steps": 4,
    "num_generations": 4,
    "output_dir": "data/sums-GRPO",
    "per_device_train_batch_size": 4,
    "report_to": ["none"],
    "reward_funcs": ["digits", "short"],
    "reward_weights": [1.0, 0.1],
    "save_strategy": "steps",
    "save_steps": 2,
    "warmup_steps": 0.1,
    "wandb_entity": "me",
}


def recipe(**changes: Any) -> None:
    model(ADDING)
    Path("sums").mkdir()
    for split, numbers in (("train", range(16)), ("test", range(16, 20))):
        rows = [{"problem": f"What is {n}+1?", "messages": [], "solution": str(n + 1)} for n in numbers]
        write_jsonl(Path("sums", f"{split}.jsonl"), rows)
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))


def test_a_main_with_a_parser() -> None:
    recipe()
    run("main.py", "--config", "recipe.yaml", "--max_grad_norm", "0.2")
    output, name = Path("data/sums-GRPO"), "model.layers.0.mlp.up_proj.weight"
    trained, last, start = (
        load_file(Path(place, "model.safetensors"))[name]
        for place in (output, output / "checkpoint-4", ADDING)
    )
    assert trained.equal(last) and not trained.float().equal(start.float())
    results = json.loads((output / "all_results.json").read_text())
    assert results["train_samples"] == 16 and results["eval_samples"] == 4 and "eval_reward" in results
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and {"loss", "reward"} <= state["log_history"][0].keys()
    assert "- open-r1" in (output / "README.md").read_text()
    used = {
        name: value
        for group in yaml.safe_load((output / "config.yaml").read_text()).values()
        for name, value in group.items()
    }
    assert (used["max_grad_norm"], used["lr_scheduler_type"], used["warmup_ratio"]) == (0.2, "cosine", 0.1)


@pytest.mark.slow
def test_a_main_that_is_started_again() -> None:
    recipe(do_eval=False, eval_strategy="no")
    run("main.py", "--config", "recipe.yaml")
    again = run("main.py", "--config", "recipe.yaml")
    assert "resuming at data/sums-GRPO/checkpoint-4" in again and "train_samples" in again


def test_an_adapter_of_the_script() -> None:
    model(ADDING)
    out = run("adapter.py")
    assert "loaded again: 0.00e+00; the base: " in out and "the base: 0.00e+00" not in out
    assert load_file("adapter/by_hand/adapter_model.safetensors").keys() == (
        load_file("adapter/final/adapter_model.safetensors").keys()
    )


def test_callbacks() -> None:
    model(ADDING)
    out = run("callbacks.py")
    # The reward is constant: after the first evaluation none is better.
    assert "stopped at 6 best at 2" in out and "saved at 6 of 40, epoch" in out
    logged = lines("log.jsonl")
    assert [one["step"] for one in logged if "reward" in one] == [1, 2, 3, 4, 5, 6]
    assert [one["eval_reward"] for one in logged if "eval_reward" in one] == [1, 1, 1]


def test_rewards_of_many_kinds() -> None:
    model(ADDING)
    write_reward_model(Path("reward-model"))
    out = run("judged.py")
    assert "'exact_share'" in out and "'rewards/reward-model/mean'" in out and "'step_seen'" in out
    first = lines("judged", "metrics.jsonl")[0]
    assert first["rewards/remote_judge/std"] > 0 and first["rewards/reward-model/std"] > 0
    # What a reward logs stands beside its completion.
    record = lines("judged/rollouts/rollout-000000.jsonl")[0]
    assert "extracted" in str(record)


@pytest.mark.slow
def test_a_stream() -> None:
    model(ADDING)
    out = run("stream.py")
    assert "went on to 4" in out and "logged [1, 2, 3, 4]" in out


def test_a_game() -> None:
    model(CALLING)
    out = run("game.py")
    assert float(out.rpartition("calls ")[2]) > 0
    records = [record for path in Path("game/rollouts").glob("*.jsonl") for record in read_lines(path)]
    assert len(records) == 16 and all("Reach" in record["prompt"] for record in records)


def test_what_is_refused_is_refused_before_anything_is_written() -> None:
    model(ADDING)
    # No weights are read.
    Path(ADDING, "model.safetensors").write_bytes(Path(ADDING, "model.safetensors").read_bytes()[:40_000])
    done = start("refused.py")
    assert done.returncode == 1 and not Path("refused").exists()
    for name in ("push_to_hub", "max_completion_length", "neftune_noise_alpha", "deepspeed"):
        assert f" {name}: " in done.stderr, done.stderr


@pytest.mark.slow
def test_a_base_in_four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    model(ADDING)
    run("qlora.py")
    adapter = load_file("qlora/adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.slow
def test_two_processes() -> None:
    model(ADDING)
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    out = run("two.py", launcher=launcher)
    assert out.count("printed once") == 1 and "rank 0 ends" in out and "rank 1 ends" in out
