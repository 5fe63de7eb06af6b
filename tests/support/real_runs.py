"""Short runs on real models, 8 rows of 16 tokens, and what transformers alone says of what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import covey
from covey.telemetry.rollouts import list_rollouts
from journeys.helpers import read_lines

STEPS, SAVED, LIMIT = 3, 2, 40


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Differs within nearly every group, whatever a model writes."""
    return [sum(c in "aeiou" for c in text) / 8 + len(set(text)) / 64 for text in completions]


def train(model: Path, data: Path, output: Path, **changes: Any) -> Path:
    """A run of three steps, with a checkpoint after two."""
    options = {
        "reward_funcs": vowels,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 16,
        "learning_rate": 1e-4,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "save_only_model": True,
        **changes,
    }
    covey.train(model=str(model), dataset=str(data), output_dir=str(output), **options)
    return output


def weights_of(directory: Path, base: Path) -> Any:
    """The model of a directory by transformers and PEFT alone, in float32."""
    if (directory / "adapter_config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, str(directory)).eval()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def worst(run: Path, rollout: int, model: Any) -> tuple[float, list[float]]:
    """The largest difference of a sampled token's log-probability from the model's, and what was recorded."""
    differences, recorded = [], []
    for record in read_lines(run / "rollouts" / f"rollout-{rollout:06d}.jsonl"):
        ids = torch.tensor([record["prompt_ids"] + record["completion_ids"]])
        with torch.no_grad():
            logprob_TV = model(ids).logits[0].log_softmax(-1)
        start = len(record["prompt_ids"])
        own = logprob_TV[range(start - 1, ids.shape[1] - 1), ids[0, start:]]
        differences.append((own - torch.tensor(record["sampler_logprobs"])).abs().max().item())
        recorded += record["sampler_logprobs"]
    return max(differences), recorded


def check_logprobs(run: Path, model: Path, bound: float = 1e-4) -> None:
    """The first rollout is the model's, the last that of checkpoint-2, which is not the model any more."""
    first, third = weights_of(model, model), weights_of(run / f"checkpoint-{SAVED}", model)
    difference, recorded = worst(run, 0, first)
    assert difference < bound
    assert max(map(abs, recorded)) > 10 * bound, "zeros would pass too"
    last = max(list_rollouts(run / "rollouts"))
    assert worst(run, last, third)[0] < bound
    assert worst(run, last, first)[0] > 10 * bound, "the model of the beginning explains the last rollout too"


def answer(directory: Path, base: Path) -> list[int]:
    """What transformers generates greedily from a directory alone, up to LIMIT tokens, prompt left out."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = [{"role": "user", "content": "What is 3+4? Answer with a number."}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    # An adapter's own; transformers and PEFT read that of its base.
    told = GenerationConfig.from_pretrained(directory)
    told.update(max_new_tokens=LIMIT, do_sample=False)
    with torch.no_grad():
        made = weights_of(directory, base).generate(input_ids=asked, generation_config=told)
    return made[0, asked.shape[1] :].tolist()
