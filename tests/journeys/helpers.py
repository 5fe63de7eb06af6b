"""What the journeys share: the command called in this process, data files of the built-in task, and reading
back what a run wrote."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.main import main
from covey.quickstart import task
from covey.telemetry.rollouts import read_rollouts

TIMES = ("time/", "throughput/", "memory/")
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


def covey(*words: str) -> Done:
    """The command in this process; starting one of its own takes four seconds."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Done(code, out.getvalue(), err.getvalue())


def succeed(*words: str) -> Done:
    """The same, for a command that has to succeed."""
    done = covey(*words)
    assert done.code == 0, done.err + done.out
    return done


def plan_of(*words: str) -> dict[str, Any]:
    """What `covey plan --json` prints."""
    return dict(json.loads(succeed("plan", "--json", *words).out))


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a person types them."""
    words = []
    for name, value in options.items():
        words.append(f"--{name}")
        if isinstance(value, list | tuple):
            words += [str(v) for v in value]
        elif isinstance(value, bool | dict):
            words.append(json.dumps(value))
        else:
            words.append(str(value))
    return words


def small(data: Path | str, output: Path | str, **changes: Any) -> dict[str, Any]:
    """Options of a run of 2 steps: 2 prompts x 4 completions a step on the built-in model."""
    return {
        "model": "quickstart",
        "dataset": [str(data)],
        "reward_funcs": ["accuracy", "format"],
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 16,
        "learning_rate": 1e-4,
        "max_steps": 2,
        "output_dir": str(output),
        **changes,
    }


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows of the built-in task as a user has them: a question and its answer."""
    pairs = task.training_pairs()[start : start + count]
    return [{"question": task.prompt_text(a, b), "answer": str(a + b)} for a, b in pairs]


def write_jsonl(path: Path, content: Sequence[Mapping[str, Any]]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return path


def own_model(target: Path) -> Path:
    """The built-in model in a directory of its own."""
    return shutil.copytree(task.MODEL_DIR, target)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without what a clock says."""
    return [timeless(line) for line in read_lines(run / "metrics.jsonl")]


def timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what a clock says."""
    return {k: v for k, v in line.items() if not k.startswith(TIMES)}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [e for e in read_lines(run / "events.jsonl") if e["kind"] == kind]


def rollouts(run: Path) -> list[list[dict[str, Any]]]:
    """The records of every rollout."""
    return [records for _, records in read_rollouts(run / "rollouts")]


def completions(run: Path) -> list[list[int]]:
    """The token ids of every completion of a run."""
    return [record["completion_ids"] for records in rollouts(run) for record in records]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: the model's and the trainer's."""
    return {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_run(actual: Path, expected: Path, step: int) -> None:
    """Equal metrics, completions and checkpoints at `step`, to the bit."""
    assert metrics(actual) == metrics(expected)
    assert completions(actual) == completions(expected)
    ours, theirs = (tensors(run / f"checkpoint-{step}") for run in (actual, expected))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("trainer/optimizer") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def size_of(directory: Path) -> int:
    """The bytes of all files below a directory."""
    return sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def assert_announced(plan: Mapping[str, Any], whole: Path, reduced: Path) -> None:
    """The bytes that a plan announces are those of a whole checkpoint and of one that is reduced."""
    assert plan["disk"]["checkpoint_bytes"] == pytest.approx(size_of(whole), rel=TOLERANCE)
    assert plan["disk"]["model_bytes"] == pytest.approx(size_of(reduced), rel=TOLERANCE)
    assert size_of(whole) > 1.1 * size_of(reduced)
