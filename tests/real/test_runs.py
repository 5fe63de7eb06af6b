"""Three steps of each kind of run on a real model, 8 rows of 16 tokens: log-probabilities, weights, checkpoints.

The log-probabilities of every sampled token are compared with those of transformers' own forward pass of the weights
that sampled it: of the model for the first rollout, of checkpoint-2 for the last. So a checkpoint is what sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey
from journeys.helpers import metrics, read_lines, succeed, write_jsonl
from covey.telemetry.rollouts import list_rollouts
from support.real import NAMES, around, real

STEPS, SAVED = 3, 2


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


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    asked = [f"Tom has {a} coins and buys {a % 5 + 2} more. How many coins does Tom have?" for a in range(2, 34)]
    rows = [{"messages": [{"role": "user", "content": text}], "solution": "7"} for text in asked]
    return write_jsonl(tmp_path_factory.mktemp("data") / "coins.jsonl", rows)


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


def answer(directory: Path, base: Path, limit: int = 40) -> list[int]:
    """What transformers generates greedily from a directory alone, prompt left out."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = [{"role": "user", "content": "What is 3+4? Answer with a number."}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = weights_of(directory, base).generate(**asked, max_new_tokens=limit, do_sample=False)
    return made[0, asked["input_ids"].shape[1] :].tolist()


VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "torch kernels": {"kernels": "torch"},
    "generate of transformers": {"engine": "generate"},
    "reference and clipping": {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 1},
    "LoRA": {"tuner_type": "lora", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_are_those_of_transformers(name, data, tmp_path):
    model = real("smollm2")
    run = train(model, data, tmp_path / "run", torch_dtype="float32", **VARIANTS[name])
    check_logprobs(run, model)
    assert all(line["grad_norm"] > 0 for line in metrics(run))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "smollm2"])
def test_a_run_around_a_real_tokenizer(name, data, tmp_path):
    model = around(name, tmp_path / "model")
    run = train(model, data, tmp_path / "run", learning_rate=1e-3)
    check_logprobs(run, model)


def test_a_resumed_run_is_the_whole_run(data, tmp_path):
    model = real("smollm2")
    whole = train(model, data, tmp_path / "whole", save_only_model=False, save_steps=10)
    cut = {"save_only_model": False, "save_steps": 10, "stop_after_steps": SAVED}
    train(model, data, tmp_path / "cut", **cut)
    run = train(model, data, tmp_path / "cut", save_only_model=False, save_steps=10, resume_from_checkpoint="latest")
    assert metrics(run) == metrics(whole)
    mine, theirs = (load_file(r / f"checkpoint-{STEPS}" / "model.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> dict[str, Path]:
    """A run of all weights and one of an adapter, each of one step."""
    root, model = tmp_path_factory.mktemp("runs"), real("smollm2")
    few = {"max_steps": 1, "learning_rate": 1e-6}
    return {
        "full": train(model, data, root / "full", **few) / "checkpoint-1",
        "adapter": train(model, data, root / "lora", tuner_type="lora", **few) / "checkpoint-1",
    }


@pytest.mark.parametrize("kind", ["checkpoint", "adapter", "merge", "float32 merge", "export"])
def test_what_a_run_leaves_stops_where_the_run_stopped(kind, runs, tmp_path):
    model, made = real("smollm2"), tmp_path / "made"
    match kind:
        case "checkpoint":
            made = runs["full"]
        case "adapter":
            made = runs["adapter"]
        case "export":
            succeed("export", str(runs["full"]), "--output_dir", str(made))
        case _:
            more = ["--dtype", "float32"] if kind == "float32 merge" else []
            succeed("export", str(runs["adapter"]), "--merge", "--output_dir", str(made), *more)
    ids = answer(made, model)
    assert len(ids) < 40 and ids[-1] == 2
