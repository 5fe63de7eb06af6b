"""Word problems with a format that is rewarded, as people train on openai/gsm8k."""

import re

from datasets import Dataset, load_dataset
from peft import LoraConfig

from covey.trl import GRPOConfig, GRPOTrainer

SYSTEM = "Write your reasoning within <reasoning> and the number alone within <answer>."
WHOLE = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?", re.DOTALL)
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def gold(answer: str) -> str | None:
    return answer.split("####")[1].strip().replace(",", "") if "####" in answer else None


def answer_of(text: str) -> str:
    found = re.findall(r"-?\d+", text.rpartition("<answer>")[2].partition("</answer>")[0])
    return found[-1] if found else ""


def questions(split: str = "train") -> Dataset:
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}],
            "answer": gold(row["answer"]),
        }
    )


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    print("-" * 20, f"Question: {question}", f"Gold: {answer[0]}", f"Text: {texts[0]}", sep="\n")
    return [2.0 if answer_of(text) == right else 0.0 for text, right in zip(texts, answer, strict=True)]


def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if answer_of(completion[0]["content"]).isdigit() else 0.0 for completion in completions]


def strict_format_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if WHOLE.fullmatch(completion[0]["content"]) else 0.0 for completion in completions]


def tag_count_reward_func(completions, **kwargs) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(0.125 for tag in TAGS if text.count(tag) == 1) - 0.001 * len(text) for text in texts]


dataset = questions()
model_name = "Qwen/Qwen2.5-1.5B-Instruct"
training_args = GRPOConfig(
    output_dir="outputs/Qwen-1.5B-GRPO",
    run_name="Qwen-1.5B-GRPO-gsm8k",
    learning_rate=5e-3,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_steps=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=24,
    num_train_epochs=1,
    max_steps=4,
    save_steps=100,
    max_grad_norm=0.1,
    report_to="none",
    log_completions=True,
)
trainer = GRPOTrainer(
    model=model_name,
    reward_funcs=[
        tag_count_reward_func,
        strict_format_reward_func,
        int_reward_func,
        correctness_reward_func,
    ],
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "up_proj"], task_type="CAUSAL_LM"
    ),
)
trainer.train()
trainer.save_model("outputs/final")
