"""A command of ms-swift, word for word; the same as YAML, as flags over YAML, and from a notebook."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.config.dialect import LEARNING_RATE, MS_SWIFT
from covey.config.file import read_file
from journeys.helpers import (
    covey,
    flags,
    metrics,
    own_model,
    plan_of,
    rollouts,
    rows,
    small,
    succeed,
    write_jsonl,
)

LINE = (
    "rlhf --rlhf_type grpo --model {model} --reward_funcs accuracy format --train_type full "
    "--torch_dtype bfloat16 --dataset '{file}#5000' --max_completion_length 1024 --num_train_epochs 1 "
    "--per_device_train_batch_size 4 --learning_rate 1e-5 --gradient_accumulation_steps 1 "
    "--max_length 2048 --num_generations 4 --temperature 0.9 --output_dir ./output"
)
OPTIONS: dict[str, Any] = {
    "reward_funcs": ["accuracy", "format"],
    "train_type": "full",
    "torch_dtype": "bfloat16",
    "max_completion_length": 1024,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-5,
    "gradient_accumulation_steps": 1,
    "max_length": 2048,
    "num_generations": 4,
    "temperature": 0.9,
}
CUT = ("--max_steps", "3")


def options_of(run: Path) -> dict[str, Any]:
    """The resolved options of a run, but for where it writes."""
    typed = read_file(str(run / "config.yaml")).typed
    return {name: t.value for name, t in typed.items() if name != "output_dir"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, 300 rows, and the run of the line in ./output."""
    place = tmp_path_factory.mktemp("place")
    own_model(place / "model")
    write_jsonl(place / "train.jsonl", rows(300))
    return place


@pytest.fixture(autouse=True)
def _inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.fixture(scope="module")
def line(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = succeed(*shlex.split(LINE.format(model="model", file="train.jsonl")), *CUT)
    assert "asks for 5000 rows but has only 300: all of them are used" in done.out
    assert "done      3 steps" in done.out
    return place / "output"


def whole() -> dict[str, Any]:
    """The options of the line with its model and file."""
    return {"model": "model", "dataset": ["train.jsonl#5000"], **OPTIONS, "max_steps": 3}


def test_the_line_runs(line: Path) -> None:
    options = options_of(line)
    for name, value in MS_SWIFT.items():
        typed = {"tuner_type": "full", "max_completion_length": 1024, "num_train_epochs": 1.0}
        assert options[name] == typed.get(name, value), name
    assert options["learning_rate"] == 1e-5
    found = metrics(line)
    assert [m["step"] for m in found] == [1, 2, 3]
    # Four completions of one prompt a step, as --per_device_train_batch_size 4 --num_generations 4 say.
    assert [m["n"]["rewards/accuracy/mean"] for m in found] == [4, 4, 4]
    assert all(m["kl"] is not None for m in found)
    assert {r["temperature"] for records in rollouts(line) for r in records} == {0.9}
    assert (line / "checkpoint-3" / "model.safetensors").is_file()


def test_the_plan_knows_the_line(line: Path) -> None:
    words = shlex.split(LINE.format(model="model", file="train.jsonl"))
    found = plan_of(*words[:-1], "elsewhere")
    assert (found["facts"]["num_rows"], found["batch"]["total_steps"]) == (300, 300)
    planned = {k: v for k, v in found["options"].items() if k not in ("output_dir", "max_steps")}
    trained = {k: v for k, v in options_of(line).items() if k != "max_steps"}
    assert planned == trained


def planned(*words: str) -> dict[str, Any]:
    """The options of a plan, but for where its run writes."""
    return {name: value for name, value in plan_of(*words)["options"].items() if name != "output_dir"}


@pytest.fixture(scope="module")
def of_line(place: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return planned(*shlex.split(LINE.format(model="model", file="train.jsonl"))[:-1], "elsewhere", *CUT)


def test_as_yaml(of_line: dict[str, Any], place: Path) -> None:
    content = {"rlhf_type": "grpo", **whole(), "output_dir": "from_yaml"}
    (place / "run.yaml").write_text(yaml.safe_dump(content))
    assert planned("rlhf", "run.yaml") == of_line


def test_as_flags_over_yaml(of_line: dict[str, Any], place: Path) -> None:
    content = {**whole(), "output_dir": "elsewhere", "temperature": 0.5, "learning_rate": 3e-3}
    (place / "base.yaml").write_text(yaml.safe_dump(content))
    over = ["--temperature", "0.9", "--learning-rate", "1e-5", "--output_dir", "flags_over_yaml"]
    assert planned("rlhf", "base.yaml", *over) == of_line


def test_its_own_configuration_again(of_line: dict[str, Any], line: Path) -> None:
    assert planned("train", "output/config.yaml", "--output_dir", "again") == of_line


def test_from_a_notebook(line: Path, place: Path) -> None:
    cells = [
        "from covey import plan, train",
        f"options = {whole()!r}",
        "planned = plan(rlhf_type='grpo', **options, output_dir='notebook')",
        "outcome = train(rlhf_type='grpo', **options, output_dir='notebook')",
        "found = outcome.exit_code, outcome.step, outcome.total_steps, str(outcome.checkpoint)",
    ]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), namespace)
    assert namespace["found"] == (0, 3, 3, "notebook/checkpoint-3")
    assert namespace["planned"]["batch"]["total_steps"] == 3
    assert options_of(place / "notebook") == options_of(line)
    assert metrics(place / "notebook") == metrics(line)


def test_a_reward_of_the_notebook(place: Path) -> None:
    """A function of a cell is called with the data's columns, and closes over what the cell holds."""
    cells = [
        "from covey import train",
        "calls = []",
        "def near(completions, answer, **kwargs):\n"
        "    calls.append(len(completions))\n"
        "    return [float(a in c) for c, a in zip(completions, answer)]",
        "async def short(completions, **kwargs):\n    return [-len(c) / 100 for c in completions]",
        "outcome = train(model='model', dataset='train.jsonl', reward_funcs=[near, short, 'format'],"
        " num_generations=4, per_device_train_batch_size=8, max_completion_length=16, max_steps=2,"
        " reward_weights=[1, 0.5, 0.25], output_dir='cells')",
    ]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), namespace)
    assert namespace["outcome"].exit_code == 0
    # The trial's two rows, six with and without their gold in four forms, then 8 completions a step.
    assert namespace["calls"] == [2, 6 * 9, 8, 8]
    for record in rollouts(place / "cells")[0]:
        near, short, form = (p["value"] for p in record["parts"])
        assert [p["name"] for p in record["parts"]] == ["near", "short", "format"]
        assert near == float(record["columns"]["answer"] in record["text"])
        assert short == -len(record["text"]) / 100
        assert record["reward"] == pytest.approx(near + 0.5 * short + 0.25 * form, rel=1e-12)


def test_without_train_type_it_is_lora(place: Path) -> None:
    text = LINE.replace("--train_type full ", "").replace("./output", "lora")
    text = text.replace("--learning_rate 1e-5 ", "")
    done = succeed(*shlex.split(text.format(model="model", file="train.jsonl")), "--max_steps", "1")
    options = options_of(place / "lora")
    assert (options["tuner_type"], options["lora_rank"], options["lora_alpha"]) == ("lora", 8, 32.0)
    assert options["learning_rate"] == LEARNING_RATE["lora"]
    assert "LoRA on all-linear, rank 8, alpha 32" in done.out
    assert (place / "lora" / "checkpoint-1" / "adapter_config.json").is_file()
    assert json.loads((place / "lora" / "checkpoint-1" / "adapter_config.json").read_text())["r"] == 8


def test_twice_is_refused_with_ways_to_go_on(line: Path) -> None:
    before = metrics(line)
    done = covey(*shlex.split(LINE.format(model="model", file="train.jsonl")))
    assert done.code == 2
    for words in ("E401", "--resume_from_checkpoint latest", "--overwrite_output_dir"):
        assert words in done.err
    assert metrics(line) == before


def test_settings_of_the_model_that_sampling_does_not_follow(tmp_path: Path) -> None:
    model = own_model(tmp_path / "model")
    file = model / "generation_config.json"
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0, "do_sample": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    options = small("quickstart#64", "run", model=str(model))
    lines = plan_of(*flags(options))["lines"]
    (line,) = [line for line in lines if line.startswith("sampling")]
    assert lines[lines.index(line) + 1].strip() == (
        "to sample as it says: --temperature 0.7 --top_p 0.8 --top_k 20"
    )
    assert line == (
        "sampling  from all tokens at temperature 1; ignored from generation_config.json: "
        "temperature 0.7, top_p 0.8, top_k 20"
    )
    options["temperature"] = 0.7
    (line,) = [line for line in plan_of(*flags(options))["lines"] if line.startswith("sampling")]
    assert line.endswith("generation_config.json: top_p 0.8, top_k 20")
    # What is proposed leaves nothing to propose.
    followed = plan_of(*flags({**options, "top_p": 0.8, "top_k": 20}))["lines"]
    (line,) = [line for line in followed if line.startswith("sampling")]
    assert line == "sampling  at temperature 0.7 with top_p 0.8, top_k 20"
    file.write_text("{}")
    assert not [line for line in plan_of(*flags(options))["lines"] if line.startswith("sampling")]


def test_a_line_with_filters(place: Path) -> None:
    """As ms-swift's examples write them, on the native engine: planned, and what is off is off."""
    line = LINE.replace("./output", "filters").format(model="model", file="train.jsonl")
    plan = plan_of(*shlex.split(f"{line} --top_p 0.9 --top_k 50"))
    assert (plan["options"]["top_p"], plan["options"]["top_k"]) == (0.9, 50)
    assert any("at temperature 0.9 with top_p 0.9, top_k 50" in text for text in plan["lines"])
    off = plan_of(*shlex.split(f"{line} --top_p 1.0 --top_k -1 --min_p 0"))
    assert not any(text.startswith("sampling") for text in off["lines"])
