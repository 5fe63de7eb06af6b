"""Two processes: one prepares the rows, both train, one writes a file that the other waits for."""

import os
import time

from datasets import load_dataset

from covey.trl import GRPOConfig, GRPOTrainer


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


if __name__ == "__main__":
    args = GRPOConfig("two", max_steps=1, max_completion_length=8, per_device_train_batch_size=4)
    with args.main_process_first(desc="rows"):
        if args.process_index == 0:
            time.sleep(1)
            os.rename("prompts.jsonl", "prepared.jsonl")
        data = load_dataset("json", data_files="prepared.jsonl", split="train")
    trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", length, args, data)
    trainer.train()
    trainer.save_model("two/final")
    trainer.accelerator.print("printed once")
    if trainer.is_world_process_zero():
        time.sleep(1)
        trainer.create_model_card()
    trainer.accelerator.wait_for_everyone()
    assert os.path.isfile("two/README.md") and os.path.isfile("two/final/config.json")
    print(f"rank {args.process_index} ends")
