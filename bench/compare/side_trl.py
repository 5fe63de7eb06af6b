"""One case with TRL: `python side_trl.py CASE.json RESULT.json`, in an environment that has TRL."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train, and return seconds of every step, of its rollout, generated tokens and peak memory."""
    import datasets
    import peft
    import rewards
    import torch
    import transformers
    import trl

    settings = trl.GRPOConfig(
        output_dir=str(work / "trl"),
        num_generations=case["num_generations"],
        per_device_train_batch_size=case["per_device_train_batch_size"],
        gradient_accumulation_steps=case["gradient_accumulation_steps"],
        max_completion_length=case["max_completion_length"],
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon_high=0.28,
        temperature=1.0,
        max_steps=case["steps"] + case["warmup"],
        bf16=case["dtype"] == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1 if case["target"] is not None else 50,
        disable_tqdm=True,
        seed=42,
        generation_kwargs={"min_new_tokens": case["max_completion_length"]} if case["forced"] else None,
        model_init_kwargs={"dtype": "float32"},
        **case["options"],
    )
    rows = [json.loads(line) for line in Path(case["data_file"]).read_text().splitlines()]
    ends: list[float] = []
    scores: list[float] = []
    rollout_s: list[float] = []
    tokens: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if case["target"] is None or "reward" not in (logs or {}):
                return
            scores.append(float(logs["reward"]))
            if len(scores) >= 10 and sum(scores[-10:]) / 10 >= case["target"]:
                control.should_training_stop = True

    class Timed(trl.GRPOTrainer):
        def _generate(self, *arguments: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            made = super()._generate(*arguments, **kwargs)
            rollout_s.append(time.perf_counter() - begin)
            tokens.append(float(sum(len(ids) for ids in made[1])))
            return made

    trainer = Timed(
        model=case["model_dir"],
        reward_funcs=getattr(rewards, case["reward"]),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Watch()],
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        if case["lora"]
        else None,
    )
    started = time.perf_counter()
    trainer.train()
    return {
        "started": started,
        "ends": ends,
        "rollout_s": rollout_s,
        "tokens": tokens,
        "scores": scores,
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
