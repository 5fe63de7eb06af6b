"""A script of TRL in two processes: what rank 1 alone asks for, and an adapter that each has drawn anew."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from covey.quickstart.built_in import BUILT_IN
from covey.trl import GRPOConfig, GRPOTrainer

RANK = int(os.environ["RANK"])
MODEL = str(BUILT_IN["quickstart"].model_dir)
ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}+1?"}]} for n in range(10, 26)])


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


class Ask(TrainerCallback):
    """Asks by rank 1 alone for a checkpoint and an evaluation at step 1, and for the end at step 3."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1:
            control.should_save = control.should_evaluate = state.global_step == 1
            control.should_training_stop = state.global_step == 3

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer.save_model(f"saved-{state.global_step}")
        self.seen.append(f"save {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.seen.append(f"evaluate {state.global_step} {metrics['eval_reward']}")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 1 and "fails" in sys.argv:
            raise ZeroDivisionError("a callback of rank 1")


torch.manual_seed(RANK)
base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
config = GRPOConfig(
    "out",
    per_device_train_batch_size=8,
    max_completion_length=8,
    max_steps=6,
    logging_steps=1,
    learning_rate=1e-2,
)
told = Ask()
trainer = GRPOTrainer(model, length, config, ROWS, eval_dataset=ROWS.select(range(2)), callbacks=[told])
trainer.train()
adapter = {n: p.double().sum().item() for n, p in model.named_parameters() if ".lora_" in n}
said = {"seen": told.seen, "step": trainer.state.global_step, "adapter": adapter}
Path(f"rank-{RANK}.json").write_text(json.dumps(said))
