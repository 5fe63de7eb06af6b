"""A data set that is read as it goes; a run that a callback stops, and that the script resumes."""

from datasets import load_dataset
from transformers import TrainerCallback

from covey.trl import GRPOConfig, GRPOTrainer


def unique_letters(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def trainer(last):
    data = load_dataset("json", data_files="prompts.jsonl", split="train", streaming=True)
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=unique_letters,
        train_dataset=data,
        args=GRPOConfig(
            "stream",
            max_steps=4,
            save_steps=100,
            max_completion_length=8,
            per_device_train_batch_size=4,
            num_generations=4,
            learning_rate=1e-3,
            logging_steps=1,
        ),
        callbacks=[StopAfter(last)],
    )


if __name__ == "__main__":
    trainer(2).train()
    again = trainer(4)
    print("went on to", again.train(resume_from_checkpoint=True).global_step)
    print("logged", [one["step"] for one in again.state.log_history if "loss" in one])
