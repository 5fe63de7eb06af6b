"""One case with ms-swift: `python side_swift.py CASE.json RESULT.json`, in an environment that has it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from memory import children_peak_bytes, peak_bytes
from watch import watcher


def main(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train, and return seconds of every step and of its parts, generated tokens and peak memory."""
    from swift.pipelines.train.rlhf import SwiftRLHF

    for name in case["reward"].split():
        register_reward(name)
    notes: dict[str, list[float]] = {
        "rollout_s": [],
        "reward_s": [],
        "tokens": [],
        "ends": [],
        "scores": [],
    }
    watch_trainer(notes)
    if case["forced"]:
        force_length(case["max_completion_length"])
    started: list[float] = []

    class Timed(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            trainer.add_callback(watcher(notes, case["target"]))
            started.append(time.perf_counter())
            return super().train(trainer)

    Timed(arguments(case, work)).main()
    return {
        **notes,
        "started": started[0],
        "peak_bytes": peak_bytes() + children_peak_bytes(),
    }


def arguments(case: dict[str, Any], work: Path) -> list[str]:
    """The command line of a case; what a CPU run needs is named, and no system prompt is added."""
    is_low = case["dtype"] == "bfloat16"
    options = {
        "rlhf_type": "grpo",
        "model": case["model_dir"],
        "model_type": "qwen2",
        "template": "chatml",
        "system": "",
        "dataset": str(rows_of(case, work)),
        "split_dataset_ratio": 0,
        "num_generations": case["num_generations"],
        "per_device_train_batch_size": case["per_device_train_batch_size"],
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_completion_length": case["max_completion_length"],
        "max_length": 2048,
        "learning_rate": case["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0,
        "adam_beta2": 0.999,
        "loss_type": "dapo",
        "beta": 0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "temperature": 1.0,
        "max_steps": case["steps"] + case["warmup"],
        "torch_dtype": case["dtype"],
        "bf16": str(is_low).lower(),
        "fp16": "false",
        "attn_impl": "sdpa",
        "tuner_type": "lora" if case["lora"] else "full",
        **({"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0} if case["lora"] else {}),
        **({"target_modules": "all-linear"} if case["lora"] else {}),
        "use_cpu": "true",
        "gradient_checkpointing": "false",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 50,
        "disable_tqdm": "true",
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "seed": case["seed"],
        "output_dir": str(work / "swift"),
        "add_version": "false",
        **case["options"],
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--reward_funcs", *case["reward"].split()]


def rows_of(case: dict[str, Any], work: Path) -> Path:
    """The rows of a case under the column names of ms-swift."""
    target = work / "swift-rows.jsonl"
    rows = [json.loads(line) for line in Path(case["data_file"]).read_text().splitlines()]
    lines = [json.dumps({"messages": row["prompt"], "solution": row["solution"]}) for row in rows]
    target.write_text("\n".join(lines) + "\n")
    return target


def register_reward(name: str) -> None:
    """Put a reward in TRL's form under its name."""
    import rewards
    from swift.rewards import ORM, orms

    function = getattr(rewards, name)

    class Bench(ORM):
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return function([[{"role": "assistant", "content": text}] for text in completions], **columns)

    orms[name] = Bench


def watch_trainer(notes: dict[str, list[float]]) -> None:
    """Time the rollout and the rewards of the trainer, and count what it generates."""
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    generate, score = GRPOTrainer._generate_completions, GRPOTrainer._compute_rewards_per_func

    def generated(self: Any, samples: Any) -> Any:
        begin = time.perf_counter()
        made = generate(self, samples)
        notes["rollout_s"].append(time.perf_counter() - begin)
        notes["tokens"].append(float(sum(len(sample.response_token_ids) for sample in made)))
        return made

    def scored(self: Any, samples: Any) -> Any:
        begin = time.perf_counter()
        found = score(self, samples)
        notes["reward_s"].append(time.perf_counter() - begin)
        notes["scores"].append(float(found[:, 0].mean()))
        return found

    GRPOTrainer._generate_completions = generated
    GRPOTrainer._compute_rewards_per_func = scored


def force_length(length: int) -> None:
    """Let no completion end before `length` tokens."""
    from swift.infer_engine import TransformersEngine

    prepare = TransformersEngine._prepare_generation_config

    def prepared(self: Any, request: Any) -> Any:
        config = prepare(self, request)
        config.min_new_tokens = length
        return config

    TransformersEngine._prepare_generation_config = prepared


if __name__ == "__main__":
    os.environ.setdefault("USE_HF", "1")
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
