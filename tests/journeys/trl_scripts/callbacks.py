"""Callbacks: a limit of time, early stopping, and one that keeps what is logged."""

import json
import time

from datasets import load_dataset
from transformers import EarlyStoppingCallback, TrainerCallback

from covey.trl import GRPOConfig, GRPOTrainer


class TimeLimit(TrainerCallback):
    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.time()

    def on_step_end(self, args, state, control, **kwargs):
        if time.time() - self.began > self.seconds:
            control.should_training_stop = True
        return control


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with open("log.jsonl", "a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    def on_save(self, args, state, control, **kwargs):
        print(f"saved at {state.global_step} of {state.max_steps}, epoch {state.epoch:.2f}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print(f"step {state.global_step}: eval_reward {metrics['eval_reward']:.2f}")


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def length(completions, **kwargs):
    return [len(completion) / 100 for completion in completions]


data = load_dataset("json", data_files={"train": "prompts.jsonl"}, split="train")
data = data.train_test_split(test_size=4, seed=0)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[constant, length],
    train_dataset=data["train"],
    eval_dataset=data["test"],
    args=GRPOConfig(
        "early",
        reward_weights=[1.0, 0.0],
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=40,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        num_generations_eval=2,
    ),
    callbacks=[TimeLimit(600), Log, EarlyStoppingCallback(early_stopping_patience=2)],
)
result = trainer.train()
print("stopped at", result.global_step, "best at", trainer.state.best_global_step)
print("loss", result.training_loss, "runtime", result.metrics["train_runtime"] > 0)
