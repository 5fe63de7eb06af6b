"""Asks for four things that covey does not do."""

from datasets import Dataset

from covey.trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
    train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c", "d"]}),
    args=GRPOConfig(
        "refused",
        push_to_hub=True,
        max_completion_length=None,
        neftune_noise_alpha=5.0,
        deepspeed="ds_zero3_offload.json",
    ),
)
trainer.train()
