"""A model, its tokenizer and rows that a program holds: the run is that of the directory and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covey as package
from covey.config.file import read_file
from covey.errors import ConfigError, GuardStop
from covey.quickstart.task import MODEL_DIR
from journeys.helpers import (
    assert_same_run,
    covey,
    flags,
    read_lines,
    rows,
    small,
    succeed,
    tensors,
    timeless,
    write_jsonl,
)
from support.adapters import make_adapter
from support.verbs import codes_in

Model = Any
TRAINED, HELD = rows(20), rows(7, start=100)
NEW = [{**row, "unit": f"apples {n}"} for n, row in enumerate(TRAINED)]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", TRAINED)
    write_jsonl(tmp_path / "held.jsonl", HELD)


def loaded(**options: Any) -> Model:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, **options)


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def live(model: Model, given: Any, output: str, **changes: Any) -> dict[str, Any]:
    """The options of a small run with objects in the place of names."""
    options = small("train.jsonl", output, **changes)
    return {**options, "model": model, "tokenizer": tokenizer(), "dataset": given}


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_holds(model: Model, directory: Path) -> None:
    """The weights of a model are those of a directory, to the bit."""
    saved = load_file(directory / "model.safetensors")
    assert {n for n, p in model.named_parameters() if not torch.equal(p, saved[n])} == set()


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "with a reference": {"beta": 0.1, "max_steps": 3},
    "bfloat16": {"torch_dtype": "bfloat16", "beta": 0.1},
    "lora": {"tuner_type": "lora", "lora_rank": 4, "beta": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_of_directory_and_file(kind: str, tmp_path: Path) -> None:
    changes = {"val_dataset": ["held.jsonl"], "eval_steps": 2, "save_steps": 1, **KINDS[kind]}
    succeed("train", *flags(small("train.jsonl", "named", **changes)))
    model = loaded().eval()
    held = datasets.Dataset.from_list(HELD)
    done = package.train(**live(model, TRAINED, "held", **{**changes, "val_dataset": {"held": held}}))
    assert_same_run(tmp_path / "held", tmp_path / "named", done.step)
    if kind == "lora":
        package.export(done.checkpoint, "merged", merge=True, base=MODEL_DIR)
        assert_holds(model, tmp_path / "merged")
    else:
        assert_holds(model, done.checkpoint)
        # What a checkpoint needs to be used is beside its weights, and samples the same.
        for run in ("named", "held"):
            succeed("eval", f"{run}/checkpoint-{done.step}", "--val_dataset", "held.jsonl")
        numbers = [f"{r}/evaluations/checkpoint-{done.step}/pass_rates.jsonl" for r in ("named", "held")]
        assert len({Path(name).read_text() for name in numbers}) == 1
    assert not model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    text = tokenizer()("What is 1+2?", return_tensors="pt")
    assert model.generate(**text, max_new_tokens=4).shape[1] > text["input_ids"].shape[1]


def test_it_is_the_object_that_is_trained(tmp_path: Path) -> None:
    """A model that differs from the directory it came from starts from the weights that it has, and a second
    run goes on from those of the first."""
    model = loaded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.01
    model.save_pretrained(tmp_path / "own")
    tokenizer().save_pretrained(tmp_path / "own")
    options = small("train.jsonl", "named", model="own")
    succeed("train", *flags(options))
    for number in (1, 2):
        package.train(**live(model, datasets.Dataset.from_list(TRAINED), f"run-{number}"))
        assert_holds(model, tmp_path / f"run-{number}/checkpoint-2")
    assert_same_run(tmp_path / "run-1", tmp_path / "named", 2)
    one, two = (tensors(tmp_path / f"run-{n}/checkpoint-2") for n in (1, 2))
    name = "model.safetensors:model.norm.weight"
    assert not torch.equal(one[name], two[name])


def test_every_column_reaches_the_rewards(tmp_path: Path) -> None:
    seen: list[str] = []

    def apples(completions: list[str], unit: list[str], **columns: Any) -> list[float]:
        seen.extend(unit)
        return [0.0] * len(completions)

    given = [NEW[:10], datasets.Dataset.from_list(NEW[10:])]
    package.train(**live(loaded(), given, "run", max_steps=1, reward_funcs=["accuracy", apples]))
    assert {row["unit"] for row in NEW} >= set(seen) != set()


def test_resume(tmp_path: Path) -> None:
    """A resumed run is the run that was never stopped, whichever weights the object has then."""
    changes = {"max_steps": 4, "save_steps": 2}
    package.train(**live(loaded(), TRAINED, "whole", **changes))
    model = loaded()
    package.train(**live(model, TRAINED, "run", **changes, stop_after_steps=2))
    package.train(**live(model, TRAINED, "run", **changes, resume_from_checkpoint="latest"))
    assert_same_run(tmp_path / "run", tmp_path / "whole", 4)
    assert_holds(model, tmp_path / "run/checkpoint-4")

    again = {**changes, "max_steps": 6, "resume_from_checkpoint": "latest"}
    with pytest.raises(ConfigError) as refused:
        package.train(**live(model, TRAINED[1:], "run", **again))
    (problem,) = [p for p in refused.value.problems if p.code == "E405"]
    assert "dataset object 20 rows" in problem.seen and "the same objects" in problem.fixes[0].text


@pytest.mark.parametrize("split", [{}, {"fsdp": "full_shard"}], ids=["whole", "split"])
def test_resume_with_a_reference(split: dict[str, Any], tmp_path: Path) -> None:
    """It has to be the object of the start, whose weights are the reference's again."""
    kl = {"max_steps": 4, "save_steps": 2, "beta": 0.1, **split}
    package.train(**live(loaded(), TRAINED, "kl-whole", **kl))
    package.train(**live(model := loaded(), TRAINED, "kl", **kl, stop_after_steps=2))
    again = {**kl, "resume_from_checkpoint": "latest"}
    with pytest.raises(ConfigError) as refused:
        package.train(**live(model, TRAINED, "kl", **again))
    assert "E405" in [p.code for p in refused.value.problems]
    package.train(**live(loaded(), TRAINED, "kl", **again))
    assert_same_run(tmp_path / "kl", tmp_path / "kl-whole", 4)


def test_what_is_on_record(tmp_path: Path) -> None:
    """config.yaml has names, with which a command cannot run."""
    package.train(**live(loaded(), TRAINED, "run", max_steps=1))
    options = {name: typed.value for name, typed in read_file("run/config.yaml").typed.items()}
    assert options["model"].startswith("object Qwen2ForCausalLM (checksum ")
    assert options["dataset"][0].startswith("object 20 rows (checksum ")
    there = sorted(tmp_path.iterdir())
    done = covey("train", "run/config.yaml", "--output_dir", "again")
    assert done.code == 2 and codes_in(done.err) == ["E376", "E376"], done.err
    assert sorted(tmp_path.iterdir()) == there
    named = ["--model", "quickstart", "--dataset", "train.jsonl"]
    succeed("train", "run/config.yaml", *named, "--output_dir", "again")


def test_evaluate(tmp_path: Path) -> None:
    """The numbers of the directory, and the object as it was."""
    options = {"reward_funcs": ["accuracy", "format"], "max_completion_length": 16, "num_generations_eval": 4}
    named = package.evaluate(MODEL_DIR, val_dataset="held.jsonl", output_dir="named", **options)
    model = loaded(dtype=torch.bfloat16)
    before = weights_of(model)
    held = datasets.Dataset.from_list(HELD)
    found = package.evaluate(
        loaded(), processing_class=tokenizer(), val_dataset={"held": held}, output_dir="held", **options
    )
    assert timeless(found.metrics) == timeless(named.metrics)
    texts = [[r["text"] for r in read_lines(Path(f"{name}/held.jsonl"))] for name in ("named", "held")]
    assert texts[0] == texts[1] and len(texts[0]) == 28
    low = package.evaluate(model, tokenizer=tokenizer(), val_dataset=held, **options)
    assert low.output_dir == Path("runs/eval-Qwen2ForCausalLM-001")
    assert {n for n, p in model.named_parameters() if p.dtype != torch.bfloat16} == set()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == set()


def fails_later(completions: list[str], trainer_state: Any = None, **columns: Any) -> list[float]:
    """A reward that works for one step."""
    if trainer_state is not None and trainer_state.global_step >= 1:
        raise RuntimeError("no more")
    return [float(len(text)) for text in completions]


def test_a_run_with_an_adapter_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = loaded()
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(GuardStop):
        package.train(**live(model, TRAINED, "run", **KINDS["lora"], max_steps=3, reward_funcs=fails_later))
    assert [n for n, _ in model.named_parameters()] == list(given)
    assert {n for n, p in model.named_parameters() if not torch.equal(p, given[n])} == set()


def test_an_adapter_goes_on_a_model_of_the_program(tmp_path: Path) -> None:
    """With the base as an object the run is that of the base's directory, evaluations of its checkpoint too;
    the KL begins at 0, and the object has what was learnt."""
    adapter = make_adapter(MODEL_DIR, tmp_path / "sft")
    asked = {"adapters": str(adapter), "beta": 0.1}
    succeed("train", *flags(small("train.jsonl", "named", **asked)))
    model = loaded()
    done = package.train(**live(model, TRAINED, "held", **asked))
    assert_same_run(tmp_path / "held", tmp_path / "named", 2)
    assert [line["kl"] == 0.0 for line in read_lines(tmp_path / "held" / "metrics.jsonl")] == [True, False]
    package.export(done.checkpoint, "merged", merge=True, base=MODEL_DIR)
    assert_holds(model, tmp_path / "merged")
    succeed("eval", "named/checkpoint-2", "--val_dataset", "held.jsonl")
