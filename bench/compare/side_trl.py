"""One case with TRL: `python side_trl.py CASE.json RESULT.json`, in an environment that has TRL."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from memory import children_peak_bytes, gpu_peak_bytes, peak_bytes
from watch import watcher


def main(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train, and return seconds of every step and of its parts, generated tokens and peak memory."""
    import datasets
    import peft
    import rewards

    rows = [json.loads(line) for line in Path(case["data_file"]).read_text().splitlines()]
    notes: dict[str, list[float]] = {"rollout_s": [], "reward_s": [], "tokens": [], "ends": [], "scores": []}
    trainer = timed_trainer(notes)(
        model=case["model_dir"],
        reward_funcs=[getattr(rewards, name) for name in case["reward"].split()],
        args=settings(case, work),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[watcher(notes, case["target"])],
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        if case["lora"]
        else None,
    )
    started = time.perf_counter()
    trainer.train()
    return {
        **notes,
        "started": started,
        "peak_bytes": gpu_peak_bytes() or peak_bytes() + children_peak_bytes(),
    }


def settings(case: dict[str, Any], work: Path, **changes: Any) -> Any:
    """TRL's options of a case."""
    import torch
    import trl

    options = {
        "output_dir": str(work / "trl"),
        "num_generations": case["num_generations"],
        "per_device_train_batch_size": case["per_device_train_batch_size"],
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_completion_length": case["max_completion_length"],
        "learning_rate": case["learning_rate"],
        "lr_scheduler_type": "constant",
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "temperature": 1.0,
        "max_steps": case["steps"] + case["warmup"],
        "bf16": case["dtype"] == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 50,
        "disable_tqdm": True,
        "seed": case["seed"],
        "generation_kwargs": {"min_new_tokens": case["max_completion_length"]} if case["forced"] else None,
        "model_init_kwargs": {"dtype": "float32"},
        **case["options"],
        **changes,
    }
    return trl.GRPOConfig(**options)


def timed_trainer(notes: dict[str, list[float]]) -> Any:
    """TRL's trainer, which also times its rollouts and rewards and counts what it generates."""
    import trl

    class Timed(trl.GRPOTrainer):
        def _generate(self, *arguments: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            made = super()._generate(*arguments, **kwargs)
            notes["rollout_s"].append(time.perf_counter() - begin)
            notes["tokens"].append(float(sum(len(ids) for ids in made[1])))
            return made

        def _calculate_rewards(self, *arguments: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = super()._calculate_rewards(*arguments, **kwargs)
            notes["reward_s"].append(time.perf_counter() - begin)
            notes["scores"].append(float(found[:, 0].mean()))
            return found

    return Timed


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
