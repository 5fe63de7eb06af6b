"""What a run hands on: transformers alone makes its prompts from every directory, and stops where it stopped.

The model is one as base models are published: its template ends turns with a token that is no end token of
any of its files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import covey as package
from covey.data.text import load_codec
from covey.quickstart.task import MODEL_DIR
from journeys.helpers import events, flags, read_lines, rollouts, rows, small, succeed, write_jsonl

QUESTION = [{"role": "user", "content": "What is 3+4?"}]
TYPED = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
)
OTHER = "{{ messages[0].content }}"
END, PAD = 314, 315


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**value, **changes}))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a template in every place that may hold one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL_DIR, "base")
    base = tmp_path / "base"
    own = (base / "chat_template.jinja").read_text()
    edit(base / "tokenizer_config.json", chat_template=own, eos_token="<|endoftext|>")
    edit(base / "chat_template.json", chat_template=OTHER)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text(OTHER)
    edit(base / "config.json", eos_token_id=PAD)
    edit(base / "generation_config.json", eos_token_id=PAD, do_sample=True, temperature=0.6, top_p=0.9)
    (tmp_path / "mine.jinja").write_text(TYPED)
    write_jsonl(tmp_path / "d.jsonl", rows(12))
    return tmp_path


def options(**changes: Any) -> dict[str, Any]:
    given = small("d.jsonl", "run", model="base", max_steps=1, save_only_model=True, learning_rate=1e-6)
    return {**given, **changes}


def train(**changes: Any) -> Path:
    succeed("train", *flags(options(**changes)))
    return Path(changes.get("output_dir", "run")) / "checkpoint-1"


def prompt_zero(run: str = "run") -> str:
    return str(rollouts(Path(run))[0][0]["prompt"])


def answer(directory: Path | str, limit: int = 40) -> list[int]:
    """Greedy tokens of transformers, told nothing but the directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    asked = transformers.GenerationConfig.from_pretrained(directory)
    asked.update(max_new_tokens=limit, do_sample=False)
    given = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        return list(model.generate(given, generation_config=asked)[0, given.shape[1] :].tolist())


def rendered(directory: Path | str) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return str(tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True))


def assert_hands_on(directory: Path) -> None:
    """End tokens, the template's own first, beside fields as they were; and an answer that ends."""
    said = json.loads((directory / "generation_config.json").read_text())
    base = json.loads(Path("base/generation_config.json").read_text())
    assert said == {**base, "eos_token_id": [END, PAD]}
    tokens = answer(directory)
    assert tokens[-1] == END and END not in tokens[:-1]
    # The base, whose files do not name it, goes on behind it.
    assert END in answer("base")[:-1]


def assert_only_the_typed(directory: Path) -> None:
    assert (directory / "chat_template.jinja").read_text() == TYPED
    assert not (directory / "chat_template.json").exists()
    assert not (directory / "additional_chat_templates").exists()
    assert "chat_template" not in json.loads((directory / "tokenizer_config.json").read_text())
    assert rendered(directory) == "user: What is 3+4?<|im_end|>assistant: "


def assert_all_of_the_source(directory: Path) -> None:
    for name in ("chat_template.json", "additional_chat_templates/tools.jinja"):
        assert (directory / name).read_bytes() == Path("base", name).read_bytes()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == Path("base", name).read_bytes()
    assert rendered(directory) == rendered("base")


def test_a_whole_model() -> None:
    checkpoint = train()
    assert_hands_on(checkpoint)
    assert_all_of_the_source(checkpoint)
    succeed("verify", str(checkpoint))
    succeed("export", str(checkpoint))
    assert_hands_on(Path("run/checkpoint-1-model"))
    assert_all_of_the_source(Path("run/checkpoint-1-model"))


def test_a_whole_model_under_a_typed_template() -> None:
    checkpoint = train(chat_template="mine.jinja")
    assert_hands_on(checkpoint)
    assert_only_the_typed(checkpoint)
    assert prompt_zero().startswith("user: What is ") and prompt_zero().endswith("assistant: ")
    succeed("verify", str(checkpoint))


@pytest.mark.parametrize("typed", [False, True])
def test_an_adapter_and_its_merge(typed: bool) -> None:
    checkpoint = train(tuner_type="lora", **({"chat_template": "mine.jinja"} if typed else {}))
    succeed("export", str(checkpoint), "--merge")
    succeed("export", str(checkpoint))
    for directory in (checkpoint, Path("run/checkpoint-1-merged"), Path("run/checkpoint-1-model")):
        assert_hands_on(directory)
        (assert_only_the_typed if typed else assert_all_of_the_source)(directory)


def test_an_adapter_of_others_is_merged_with_what_its_template_ends_turns_with() -> None:
    checkpoint = train(tuner_type="lora", chat_template="mine.jinja")
    others = Path("others")
    others.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"):
        shutil.copy(checkpoint / name, others)
    succeed("export", "others", "--merge")
    assert_hands_on(Path("others-merged"))
    assert_only_the_typed(Path("others-merged"))


def test_a_model_without_a_template_gets_the_typed_one() -> None:
    edit(Path("base/tokenizer_config.json"), chat_template=None)
    for name in ("chat_template.json", "chat_template.jinja"):
        Path("base", name).unlink()
    shutil.rmtree("base/additional_chat_templates")
    checkpoint = train(chat_template="chatml")
    assert rendered(checkpoint) == load_codec(Path("base"), chat_template="chatml").render(QUESTION)


def test_an_object_of_a_program() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    package.train(**{**options(chat_template="mine.jinja"), "model": model, "tokenizer": tokenizer})
    assert_hands_on(Path("run/checkpoint-1"))
    assert_only_the_typed(Path("run/checkpoint-1"))


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_sharded_model(tuner: str) -> None:
    checkpoint = train(chat_template="mine.jinja", tuner_type=tuner, fsdp="full_shard")
    assert_hands_on(checkpoint)
    assert_only_the_typed(checkpoint)


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_second_run_makes_the_same_prompts_and_stops_where_the_first_did(tuner: str) -> None:
    first = train(chat_template="mine.jinja", tuner_type=tuner)
    second = train(model=str(first), output_dir="second")
    assert prompt_zero("second") == prompt_zero()
    ends = [rollouts(Path(run))[0][0]["stop_token_ids"] for run in ("run", "second")]
    assert ends == [[END, PAD]] * 2
    assert_hands_on(second)
    assert_only_the_typed(second)
    # What is evaluated is asked in the same way; beside its run a checkpoint has the options of the run.
    shutil.copytree(second, "alone")
    succeed("eval", "alone", "--val_dataset", "d.jsonl", "--reward_funcs", "accuracy", "--output_dir", "e")
    (file,) = (path for path in Path("e").glob("*.jsonl") if path.name != "pass_rates.jsonl")
    prompts = [record["prompt"] for record in read_lines(file)]
    assert prompt_zero() in prompts and all(prompt.endswith("assistant: ") for prompt in prompts)


def test_what_no_file_can_hold_is_said_at_the_end() -> None:
    told = {"system": "You add " + "numbers " * 30, "chat_template_kwargs": {"deep": 1}}
    done = succeed("train", *flags(options(tuner_type="lora", **told)))
    said = " ".join(done.out.partition("done ")[2].split())
    assert (
        "--system 'You add numbers" in said
        and "…" in said
        and "--chat_template_kwargs '{\"deep\": 1}'" in said
    )
    assert "end tokens 314, 315" in said and "which lists 315" in said
    quiet = succeed("train", *flags(options(output_dir="quiet"))).out.partition("done ")[2]
    assert "no file" not in quiet and "end tokens" not in quiet
    assert events(Path("quiet"), "saved")
