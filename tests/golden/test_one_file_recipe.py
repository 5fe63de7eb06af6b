"""The package against `recipes/one_file_grpo.py`: two programs of the same algorithm, step for step.

The recipe shares no code with the package, so an error in either of them shows as a difference.
"""

from __future__ import annotations

import ast
import copy
import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.config.resolve import from_dict
from covey.quickstart import task
from covey.telemetry.rollouts import read_rollouts
from covey.training.run import train

RECIPE = Path(__file__).parents[2] / "recipes" / "one_file_grpo.py"
MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class Setting:
    """One configuration in the words of both programs; `prompts` x 8 completions a rollout."""

    name: str
    steps: int
    prompts: int = 8
    rows_per_forward: int = 64
    num_iterations: int = 1
    loss_type: str = "dapo"
    beta: float = 0.0
    temperature: float = 1.0


SETTINGS = (
    Setting("dapo", steps=10),
    # Three forward passes a step, ratios that reach the clip, a KL term and a temperature.
    Setting(
        "grpo-twice-kl",
        steps=10,
        prompts=6,
        rows_per_forward=16,
        num_iterations=2,
        loss_type="grpo",
        beta=0.1,
        temperature=0.9,
    ),
)


@dataclass(frozen=True)
class Run:
    """What a program says of its steps, and the weights that it ends with."""

    lines: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


def run_recipe(setting: Setting, rows: Path, directory: Path) -> Run:
    log, model = directory / "recipe.jsonl", directory / "recipe-model"
    options: dict[str, Any] = {
        "model": task.MODEL_DIR,
        "data": rows,
        "output": log,
        "save": model,
        "steps": setting.steps,
        "prompts_per_step": setting.prompts,
        "rows_per_forward": setting.rows_per_forward,
        "num_iterations": setting.num_iterations,
        "loss_type": setting.loss_type,
        "beta": setting.beta,
        "temperature": setting.temperature,
    }
    runpy.run_path(str(RECIPE))["main"]([f"--{name}={value}" for name, value in options.items()])
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return Run(lines, load_file(model / MODEL_FILE))


def run_package(setting: Setting, rows: Path, directory: Path) -> Run:
    output = directory / "package"
    completions = 8 * setting.prompts
    outcome = train(
        from_dict(
            {
                "model": "quickstart",
                "torch_dtype": "float32",
                "dataset": [str(rows)],
                "reward_funcs": ["accuracy", "format"],
                "num_generations": 8,
                "per_device_train_batch_size": setting.rows_per_forward,
                "gradient_accumulation_steps": completions // setting.rows_per_forward,
                "num_iterations": setting.num_iterations,
                "max_completion_length": 32,
                "temperature": setting.temperature,
                "loss_type": setting.loss_type,
                "beta": setting.beta,
                "learning_rate": 1e-4,
                "max_steps": setting.steps,
                "seed": 42,
                "output_dir": str(output),
            }
        )
    )
    rollouts = {
        number: [record["completion_ids"] for record in records]
        for number, records in read_rollouts(output / "rollouts")
    }
    metrics = [
        json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    lines = [
        {
            "step": m["step"],
            "reward": m["reward"],
            "reward_std": m["reward_std"],
            "loss": m["loss"],
            "grad_norm": m["grad_norm"],
            "mean_length": m["completions/mean_length"],
            "completion_ids": rollouts[m["rollout"]],
        }
        for m in metrics
    ]
    return Run(lines, load_file(outcome.checkpoint / MODEL_FILE))


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Where two logs differ by more than rounding; the first entry is the earliest."""
    found = []
    if [line["step"] for line in one] != [line["step"] for line in other]:
        found.append(f"steps: {[line['step'] for line in one]} and {[line['step'] for line in other]}")
    for a, b in zip(one, other, strict=False):
        if a["completion_ids"] != b["completion_ids"]:
            rows = zip(a["completion_ids"], b["completion_ids"], strict=False)
            found.append(f"step {a['step']}: completions {[i for i, (x, y) in enumerate(rows) if x != y]}")
        for name, relative, absolute in (
            ("reward", 0.0, 1e-6),
            ("reward_std", 0.0, 1e-6),
            ("mean_length", 0.0, 1e-6),
            ("loss", 0.0, 1e-5),
            ("grad_norm", 1e-4, 0.0),
        ):
            # Written so that NaN is a difference.
            if not abs(a[name] - b[name]) <= absolute + relative * abs(b[name]):
                found.append(f"step {a['step']}: {name} {a[name]} and {b[name]}")
    return found


def weight_difference(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """Norm of the difference of two trained models over the norm of what training changed."""
    assert one.keys() == other.keys() == start.keys()

    def norm(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([(a[name] - b[name]).double().flatten() for name in a]).norm()

    return float(norm(one, other) / norm(other, start))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in task.training_rows()), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda s: s.name)
def pair(
    request: pytest.FixtureRequest, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Run]:
    """The recipe's run and the package's, in the same setting and with the same number of threads."""
    directory = tmp_path_factory.mktemp(request.param.name)
    threads = torch.get_num_threads()
    # One thread: on a busy machine two spend most of their time waiting for each other.
    torch.set_num_threads(1)
    try:
        recipe = run_recipe(request.param, rows, directory)
        package = run_package(request.param, rows, directory)
    finally:
        torch.set_num_threads(threads)
    return recipe, package


def test_package_and_recipe_take_the_same_steps(pair: tuple[Run, Run]) -> None:
    recipe, package = pair
    assert len(recipe.lines) == 10
    assert not differences(recipe.lines, package.lines)


def test_package_and_recipe_end_with_the_same_weights(pair: tuple[Run, Run]) -> None:
    recipe, package = pair
    start = load_file(task.MODEL_DIR / MODEL_FILE)
    assert weight_difference(recipe.weights, package.weights, start) <= 1e-3


def test_the_runs_learn_something(pair: tuple[Run, Run]) -> None:
    """Equal zeros would prove nothing."""
    for line in pair[0].lines:
        assert line["grad_norm"] > 1e-2 and line["reward_std"] > 0.1 and line["loss"] != 0.0


def test_a_small_fault_is_a_difference(pair: tuple[Run, Run]) -> None:
    """The comparison sees a doubled gradient norm, another token, a missing step and untrained weights."""
    recipe, package = pair
    doubled, token, lost = (copy.deepcopy(recipe.lines) for _ in range(3))
    doubled[4]["grad_norm"] *= 2
    token[7]["completion_ids"][5][-1] += 1
    del lost[-1]
    assert [d.split(":")[0] for d in differences(doubled, package.lines)] == ["step 5"]
    assert differences(token, package.lines) == ["step 8: completions [5]"]
    assert differences(lost, package.lines)
    start = load_file(task.MODEL_DIR / MODEL_FILE)
    assert weight_difference(start, package.weights, start) > 0.99


def test_the_recipe_is_short_and_stands_alone() -> None:
    source = RECIPE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 280
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"numpy", "torch", "transformers"}
    assert "import_module" not in source and "__import__" not in source
