"""A base in 4 bits with an adapter on it."""

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from covey.trl import GRPOConfig, GRPOTrainer


def digits(completions, **kwargs):
    return [float(sum(letter.isdigit() for letter in completion)) for completion in completions]


if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=digits,
        train_dataset=Dataset.from_dict({"prompt": [f"What is {n}+1?" for n in range(8)]}),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
        args=GRPOConfig(
            "qlora",
            max_steps=2,
            max_completion_length=8,
            learning_rate=1e-3,
            model_init_kwargs={
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True,
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_compute_dtype=torch.bfloat16,
                    bnb_4bit_use_double_quant=True,
                ),
                "dtype": torch.bfloat16,
                "attn_implementation": "sdpa",
                "device_map": "auto",
            },
        ),
    )
    trainer.train()
    trainer.save_model()
