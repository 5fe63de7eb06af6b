"""The work that is compared: a model, data, a reward and the sizes of a step, the same for every side."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    per_device_train_batch_size x gradient_accumulation_steps completions make a step, num_generations of each
    prompt. `forced` completions run to max_completion_length. `options` are further ones that both sides
    have under one name. `target` ends the run where the mean of the first reward over ten steps reaches it.
    """

    name: str
    says: str
    model: str = "quickstart"
    data: str = "sums"
    reward: str = "answer"
    num_generations: int = 8
    per_device_train_batch_size: int = 64
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 64
    forced: bool = False
    steps: int = 20
    warmup: int = 4
    dtype: str = "float32"
    lora: bool = False
    learning_rate: float = 1e-4
    target: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_LARGE = Case(
    name="e-fp32",
    says="125 M parameters, vocabulary 151,936, 512 forced tokens",
    model="125m",
    per_device_train_batch_size=8,
    max_completion_length=512,
    forced=True,
    steps=2,
    warmup=1,
    reward="length",
    learning_rate=1e-6,
)

CASES = (
    Case(name="a", says="natural length, 64 completions"),
    Case(name="a8", says="natural length, 8 completions", per_device_train_batch_size=8),
    Case(
        name="b",
        says="256 forced tokens, 16 completions",
        per_device_train_batch_size=16,
        max_completion_length=256,
        forced=True,
        steps=10,
    ),
    Case(
        name="c",
        says="ragged lengths, a straggler in each batch",
        model="ragged",
        data="letters",
        reward="length",
        max_completion_length=1024,
        learning_rate=1e-6,
        steps=10,
    ),
    Case(
        name="d",
        says="1,000-token prompts, 14 forced tokens",
        data="long",
        max_completion_length=14,
        forced=True,
        steps=5,
        warmup=1,
    ),
    _LARGE,
    replace(_LARGE, name="e-bf16", says="the same in bfloat16", dtype="bfloat16"),
    Case(name="f", says="half of the groups without signal", reward="half"),
    Case(
        name="g4",
        says="accumulation 4",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
    ),
    Case(
        name="g32",
        says="accumulation 32",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=32,
        steps=10,
        warmup=2,
    ),
    Case(name="h", says="LoRA, rank 16, all linear layers", lora=True),
    Case(name="target", says="seconds to 0.80 of the answers", steps=800, target=0.80),
)


def prepare(case: Case, work: Path) -> dict[str, Any]:
    """Write model, data and rewards of a case below `work`, and return what a side reads."""
    model = work / "models" / case.model
    if not model.is_dir():
        _MODELS[case.model](model)
    data = work / f"{case.data}.jsonl"
    if not data.is_file():
        rows = _DATA[case.data]()
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**asdict(case), "model_dir": str(model), "data_file": str(data)}


def _prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _sums() -> list[dict[str, Any]]:
    from covey.quickstart import task

    return [
        {"prompt": _prompt(f"What is {a}+{b}?"), "solution": str(a + b)} for a, b in task.training_pairs()
    ]


def _long() -> list[dict[str, Any]]:
    """The same behind so many sums that the prompt has about 1,000 tokens."""
    chance = random.Random(0)
    rows = _sums()[:256]
    for row in rows:
        filler = " ".join(f"{chance.randint(10, 99)}+{chance.randint(10, 99)}" for _ in range(165))
        row["prompt"] = _prompt(f"{filler} {row['prompt'][0]['content']}")
    return rows


def _letters() -> list[dict[str, Any]]:
    return [{"prompt": _prompt(f"What is {n}?"), "solution": ""} for n in range(512)]


def _quickstart(target: Path) -> None:
    from covey.quickstart.task import MODEL_DIR

    shutil.copytree(MODEL_DIR, target)


def _ragged(target: Path) -> None:
    """Random weights, whose end token comes by chance: lengths are geometric, the longest of 64 is far from
    the mean."""
    _random(target, hidden=128, layers=4, heads=4, intermediate=384, vocabulary=None)


def _large(target: Path) -> None:
    _random(target, hidden=512, layers=12, heads=8, intermediate=1536, vocabulary=151_936)


def _half_billion(target: Path) -> None:
    """The sizes of Qwen 2.5 0.5B, but for the number of key heads."""
    _random(target, hidden=896, layers=24, heads=14, intermediate=4864, vocabulary=151_936)


def _random(
    target: Path, *, hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int | None
) -> None:
    import torch
    import transformers

    from covey.quickstart.task import MODEL_DIR

    _quickstart(target)
    (target / "model.safetensors").unlink()
    own = json.loads((MODEL_DIR / "config.json").read_text())
    config = transformers.Qwen2Config(
        vocab_size=vocabulary or own["vocab_size"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=own["eos_token_id"],
        pad_token_id=own.get("pad_token_id"),
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(target)


_MODELS: Mapping[str, Callable[[Path], None]] = {
    "quickstart": _quickstart,
    "ragged": _ragged,
    "125m": _large,
    "500m": _half_billion,
}
_DATA: Mapping[str, Callable[[], list[dict[str, Any]]]] = {"sums": _sums, "long": _long, "letters": _letters}
