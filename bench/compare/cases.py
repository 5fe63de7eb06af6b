"""The work that is compared: a model, data, a reward and the sizes of a step, the same for every side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from models import DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    per_device_train_batch_size x gradient_accumulation_steps completions make a step, num_generations of each
    prompt. `forced` completions run to max_completion_length; with `mean_length` each has a length of its
    own, drawn around that mean (covey alone can do that). `options` are further ones that all sides have
    under one name. `reward` names functions of rewards.py, each of weight 1. `target` ends the run where the
    mean of the first reward over ten steps reaches it. A case of long steps runs `most_runs` times at most.
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
    mean_length: int | None = None
    steps: int = 20
    warmup: int = 4
    dtype: str = "float32"
    lora: bool = False
    learning_rate: float = 1e-4
    seed: int = 42
    target: float | None = None
    most_runs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_LARGE = Case(
    name="e-fp32",
    says="125 M parameters, vocabulary 151,936, 512 forced tokens",
    model="125m",
    per_device_train_batch_size=8,
    max_completion_length=512,
    forced=True,
    steps=1,
    warmup=1,
    reward="length",
    learning_rate=1e-6,
    most_runs=1,
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
        reward="length",
        steps=10,
    ),
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
    ),
    Case(name="h", says="LoRA, rank 16, all linear layers", lora=True),
    Case(
        name="target",
        says="seconds to 0.80 of the answers",
        reward="answer form",
        max_completion_length=32,
        steps=800,
        target=0.80,
    ),
    Case(
        name="d",
        says="1,000-token prompts, 14 forced tokens",
        data="long",
        max_completion_length=14,
        forced=True,
        reward="length",
        steps=4,
        warmup=1,
        most_runs=2,
    ),
    Case(
        name="c",
        says="ragged lengths, a straggler in each batch",
        model="ragged",
        data="letters",
        reward="length",
        max_completion_length=1024,
        learning_rate=1e-6,
        steps=4,
        warmup=1,
        most_runs=2,
    ),
    Case(
        name="real",
        says="SmolLM2-135M-Instruct on word problems, 32 completions of up to 48 tokens",
        model="smollm2",
        data="problems",
        reward="number",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_completion_length=48,
        learning_rate=3e-5,
        steps=3,
        warmup=1,
        most_runs=2,
    ),
    _LARGE,
    replace(_LARGE, name="e-bf16", says="the same in bfloat16", dtype="bfloat16"),
)


def prepare(case: Case, work: Path) -> dict[str, Any]:
    """Write model and data of a case below `work`, and return what a side reads."""
    model = work / "models" / case.model
    if not model.is_dir():
        # In a process of its own, so that the one that starts the sides stays small.
        script = str(Path(__file__).with_name("models.py"))
        subprocess.run([sys.executable, script, case.model, str(model)], check=True, capture_output=True)
    data = work / f"{case.data}.jsonl"
    if not data.is_file():
        data.write_text("".join(json.dumps(row) + "\n" for row in DATA[case.data]()))
    return {**asdict(case), "model_dir": str(model), "data_file": str(data)}
