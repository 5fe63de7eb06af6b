"""A model of peft that the script has made itself, and that it loads again afterwards."""

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.trl import GRPOConfig, GRPOTrainer

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32, device_map="cpu")
model.config.use_cache = False
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
model.print_trainable_parameters()


def many_nines(completions, **kwargs):
    return [float(completion.count("9")) for completion in completions]


rows = [{"question": f"What is {n}+{n + 1}?"} for n in range(16)]
dataset = Dataset.from_list(rows).map(
    lambda row: {
        "prompt": tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
        )
    }
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[many_nines],
    train_dataset=dataset,
    args=GRPOConfig(
        output_dir="adapter",
        learning_rate=1e-2,
        max_completion_length=12,
        max_steps=3,
        per_device_train_batch_size=8,
        beta=0.04,
        logging_steps=1,
        report_to=[],
    ),
)
trainer.train()
trainer.model.save_pretrained("adapter/by_hand")
trainer.save_model("adapter/final")
tokenizer.save_pretrained("adapter/final")

base = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32)
again = PeftModel.from_pretrained(base, "adapter/final").eval()
ids = tokenizer("What is 3+4?", return_tensors="pt")
with torch.no_grad():
    moved = (again(**ids).logits - trainer.model.eval()(**ids).logits).abs().max().item()
    with again.disable_adapter():
        changed = (again(**ids).logits - trainer.model(**ids).logits).abs().max().item()
print(f"loaded again: {moved:.2e}; the base: {changed:.2e}")
print(tokenizer.decode(again.generate(**ids, max_new_tokens=4, do_sample=False)[0]))
