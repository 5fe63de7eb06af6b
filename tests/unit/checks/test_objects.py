"""Objects in the place of names: `plan` shows what `train` would do with them, and what it would refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas
import peft
import pytest
import torch
import transformers

import covey
from covey.errors import ConfigError
from covey.quickstart.task import MODEL_DIR
from support.verbs import alone

ROWS = [{"question": f"What is {n}+1?", "solution": str(n + 1)} for n in range(16)]
TABLE = datasets.Dataset.from_list(ROWS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def loaded() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR)


def stream() -> datasets.IterableDataset:
    def numbered() -> Iterator[dict[str, Any]]:
        yield from ROWS

    return datasets.IterableDataset.from_generator(numbered)


def planned(**options: Any) -> dict[str, Any]:
    data = {} if "train_dataset" in options else {"dataset": "train.jsonl"}
    fixed = {"reward_funcs": "accuracy", "max_completion_length": 8, "learning_rate": 1e-4}
    plan = covey.plan(**{"model": "quickstart", **data, **fixed, **options})
    return dict(json.loads(json.dumps(plan)))


def refused(**options: Any) -> list[tuple[str, str]]:
    """(code, option) of all that a plan is refused for; nothing is written."""
    there = sorted(Path().iterdir())
    with pytest.raises(ConfigError) as error:
        planned(**options)
    assert sorted(Path().iterdir()) == there
    return [(p.code, p.option) for p in error.value.problems if p.severity.name == "ERROR"]


@pytest.mark.parametrize(
    "given", [ROWS, TABLE, pandas.DataFrame(ROWS), [ROWS[:4], TABLE.select(range(4, 16))], {"sums": TABLE}]
)
@pytest.mark.parametrize("name", ["dataset", "train_dataset"])
def test_rows(given: Any, name: str) -> None:
    plan, named = planned(**{name: given}), planned()
    assert plan["facts"]["num_prompts"] == 16 and plan["batch"] == named["batch"]
    assert all("object " in text for text in plan["options"]["dataset"])


def test_rows_beside_names() -> None:
    plan = planned(
        dataset=["train.jsonl#4", TABLE, "quickstart#3"], eval_dataset={"held": ROWS, "file": "train.jsonl"}
    )
    assert plan["facts"]["num_prompts"] == 4 + 16 + 3
    assert plan["facts"]["eval_sets"] == [
        {"name": "held", "num_prompts": 16},
        {"name": "file", "num_prompts": 16},
    ]
    # The name of a set is the task of its rows, as in front of a file.
    plan = planned(dataset={"sums": ROWS, "more": TABLE}, task_column="kind")
    assert plan["facts"]["tasks"] == {"sums": 16, "more": 16}


def test_a_stream() -> None:
    plan = planned(dataset=stream(), streaming=True, max_steps=2)
    assert plan["options"]["dataset"] == ["object IterableDataset (stream)"]
    assert plan["facts"]["columns"] == ["question", "solution"]
    # A table is a stream too.
    assert planned(dataset=TABLE, streaming=True, max_steps=2)["batch"]["total_steps"] == 2


def test_a_model(tokenizer: Any) -> None:
    plan, named = planned(model=loaded(), processing_class=tokenizer), planned()
    (line,) = [line for line in plan["lines"] if line.startswith("model ")]
    assert line.startswith("model     object Qwen2ForCausalLM (checksum ") and "0.83 M parameters" in line
    same = ("num_parameters", "model_sizes", "model_context", "stop_tokens", "first_prompt", "longest_prompt")
    assert {n: plan["facts"][n] for n in same} == {n: named["facts"][n] for n in same}
    # Without a tokenizer it is that of where the model was loaded from.
    assert planned(model=loaded())["facts"]["stop_tokens"] == named["facts"]["stop_tokens"]


@pytest.mark.parametrize(
    ("named", "given", "words"),
    [
        ("", None, "does not say where it was loaded from"),
        ("nobody/nothing", None, "nobody/nothing is missing from the cache"),
        ("", "bare", "bare has no tokenizer.json"),
    ],
)
def test_without_a_tokenizer(named: str, given: str | None, words: str) -> None:
    model = loaded()
    model.name_or_path = named
    Path("bare").mkdir()
    with pytest.raises(ConfigError) as error:
        planned(model=model, tokenizer=given)
    (problem,) = error.value.problems
    assert (problem.code, problem.option) == ("E377", "tokenizer") and words in problem.seen, problem.seen


def test_a_template_set_on_the_tokenizer() -> None:
    own = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    own.chat_template = "Q: {{ messages[0]['content'] }}\nA:"
    assert planned(model=loaded(), tokenizer=own)["facts"]["first_prompt"] == "Q: What is 0+1?\nA:"


def test_frozen_weights(tokenizer: Any) -> None:
    model = loaded()
    model.model.embed_tokens.weight.requires_grad_(False)
    assert refused(model=model, tokenizer=tokenizer) == [("E377", "model")]
    assert planned(model=model, tokenizer=tokenizer, tuner_type="lora")["facts"]["num_trained"]


def test_a_lora_config() -> None:
    given = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True)
    options = planned(peft_config=given, callbacks=None, optimizers=(None, None))["options"]
    names = ("tuner_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
    assert [options[name] for name in names] == ["lora", 4, 8.0, 0.0, ["q_proj", "v_proj"], True]
    assert planned(peft_config=given, use_peft=True, lora_r=4)["options"] == options
    assert planned(peft_config=None)["options"]["tuner_type"] == "full"
    assert planned(peft_config=peft.LoraConfig(target_modules="all-linear"))["options"]["lora_rank"] == 8


@pytest.mark.parametrize(
    ("given", "typed", "code", "words"),
    [
        (peft.LoraConfig(bias="all", rank_pattern={"q_proj": 2}), {}, "E102", "bias all, rank_pattern"),
        (peft.LoraConfig(target_modules=".*q_proj"), {}, "E102", "a pattern as target_modules (.*q_proj)"),
        (
            peft.LoraConfig(layers_to_transform=[0], target_modules=["q_proj"]),
            {},
            "E102",
            "layers_to_transform",
        ),
        (peft.IA3Config(), {}, "E102", "peft_type IA3"),
        (peft.LoraConfig(r=4), {"lora_r": 8}, "E106", "8 (argument lora_r) and 4 (LoraConfig"),
        ({"r": 4}, {}, "E102", "no option peft_config"),
    ],
)
def test_an_adapter_of_another_kind(given: Any, typed: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(peft_config=given, **typed)
    (problem,) = error.value.problems
    assert problem.code == code and words in problem.seen, problem.seen


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"tokenizer": "OTHER"}, [("E377", "tokenizer")]),
        ({"tokenizer": "some/model"}, [("E377", "tokenizer")]),
        ({"dataset": 7}, [("E377", "dataset")]),
        # One fault of one list, however long it is.
        ({"dataset": [*ROWS, None, *ROWS]}, [("E377", "dataset")]),
        ({"dataset": datasets.DatasetDict({"train": TABLE})}, [("E377", "dataset")]),
        ({"dataset": stream()}, [("E377", "dataset")]),
        ({"val_dataset": stream()}, [("E377", "val_dataset")]),
        ({"dataset": [{"text": "a"}]}, [("E303", "dataset"), ("E303", "dataset")]),
        ({"dataset": "object 3 rows (checksum 00000000)"}, [("E376", "dataset")]),
        ({"model": "object MyModel (checksum 00000000)"}, [("E376", "model")]),
        ({"dataset": TABLE, "train_dataset": ROWS[:4]}, [("E106", "dataset")]),
        ({"val_dataset": TABLE, "eval_dataset": TABLE}, [("E106", "val_dataset")]),
        ({"tokenizer": None, "processing_class": "OTHER"}, [("E377", "tokenizer")]),
        (
            {"tokenizer": "OTHER", "processing_class": "OTHER"},
            [("E106", "tokenizer"), ("E377", "tokenizer")],
        ),
        ({"callbacks": [print], "args": object()}, [("E102", "callbacks"), ("E102", "args")]),
        # All at once.
        (
            {
                "model": torch.nn.Linear(2, 2),
                "tokenizer": "TOKENIZER",
                "dataset": [ROWS, "text"],
                "val_dataset": 7,
                "num_generations": 1,
            },
            [("E377", "val_dataset"), ("E377", "model"), ("E201", "num_generations")],
        ),
    ],
)
def test_refused(options: dict[str, Any], problems: list[tuple[str, str]], tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    objects = {"TOKENIZER": tokenizer, "OTHER": other}
    given = {
        name: objects.get(value, value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    assert refused(**given) == problems


def test_the_tokenizer_of_a_named_model(tokenizer: Any) -> None:
    """One that pads and looks otherwise, but cuts text as the model's own does, is no other one."""
    same = copy.deepcopy(tokenizer)
    same.pad_token, same.padding_side = same.eos_token, "left"
    same(["a", "b c"], padding=True, truncation=True, max_length=4)
    assert planned(tokenizer=same)["facts"]["num_trained"]


def test_a_reward_model(tokenizer: Any) -> None:
    """One that is an object is refused, beside what else is there; it is used by its directory."""
    model = loaded()
    given = {"reward_funcs": [model, "accuracy"], "reward_processing_classes": tokenizer}
    assert refused(**given, reward_weights=[1, 2]) == [("E377", "reward_funcs")]
    with pytest.raises(ConfigError, match="the model Qwen2ForCausalLM as an object") as error:
        planned(**given)
    assert f"give its name, from which it was loaded: '{model.name_or_path}'" in str(error.value)


def test_rewards_of_one_name() -> None:
    """Callables that a program alone has keep apart; one that is given twice is one too many."""

    def of_length(completions: list[str], least: int = 0, **columns: Any) -> list[float]:
        return [float(len(text) > least) for text in completions]

    several = [partial(of_length, least=n) for n in range(3)]
    plan = planned(reward_funcs=[*several, "accuracy", lambda completions: [1.0] * len(completions)])
    names = ["of_length", "of_length_2", "of_length_3", "accuracy", "lambda"]
    assert plan["options"]["reward_funcs"] == names
    assert refused(reward_funcs=[several[0], several[0]]) == [("E307", "reward_funcs")]
