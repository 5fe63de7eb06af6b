"""A model at fault hides nothing: what is wrong with model, template and data comes together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from covey.cli.main import main
from covey.quickstart.task import MODEL_DIR
from support.verbs import alone, codes_in

EMPTY = ""
NO_GOLD = '{"question": "What is 1+2?"}\n'


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(MODEL_DIR, tmp_path / "model")


def refused(capsys: pytest.CaptureFixture[str], rows: str, *words: str, model: str = "model") -> str:
    """What a command with these rows says; it has to be refused, with nothing written."""
    Path("d.jsonl").write_text(rows)
    there = {path.name for path in Path().iterdir()}
    command = ["train", "--model", model, "--dataset", "d.jsonl", "--reward_funcs", "accuracy", *words]
    assert main([*command, "--max_completion_length", "8", "--learning_rate", "1e-4"]) == 2
    assert {path.name for path in Path().iterdir()} == there
    return capsys.readouterr().err


def _no_weights() -> None:
    Path("model/model.safetensors").unlink()


def _no_tokenizer() -> None:
    Path("model/tokenizer.json").unlink()


def _a_tensor_less() -> None:
    tensors = load_file("model/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})


def _quantized() -> None:
    config = json.loads(Path("model/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    Path("model/config.json").write_text(json.dumps(config))


def _a_token_more() -> None:
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    new = {"id": 320, "content": "<new>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({**new, **flags})
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(("rows", "of_data"), [(EMPTY, "E309"), (NO_GOLD, "E303")])
@pytest.mark.parametrize(
    ("spoil", "of_model"),
    [
        (_no_weights, "E301"),
        (_no_tokenizer, "E301"),
        (_a_tensor_less, "E372"),
        (_quantized, "E373"),
        (_a_token_more, "E374"),
    ],
)
def test_model_and_data(capsys: pytest.CaptureFixture[str], spoil, of_model, rows: str, of_data: str) -> None:
    spoil()
    assert codes_in(refused(capsys, rows)) == [of_model, of_data]


def test_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, EMPTY, "--chat_template", "absent.jinja", model="org/nothing")
    assert codes_in(said) == ["E321", "E313", "E309"]


def test_words_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    _a_tensor_less()
    said = refused(capsys, '{"question": "What is 1+2?", "solution": "3"}\n' * 64)
    assert "lack 1 tensor of a Qwen2ForCausalLM: model.norm.weight" in " ".join(said.split())


def test_words_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    _a_token_more()
    said = " ".join(refused(capsys, EMPTY).split())
    assert "has 1 token without a row in the embedding, which has 320 rows" in said
    assert "'<new>' (320)" in said
    # Tokens of pictures are in no text; some models of text have one more of them than rows.
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps({**settings, "image_token": "<new>"}))
    assert codes_in(refused(capsys, EMPTY)) == ["E309"]
