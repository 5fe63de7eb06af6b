"""Models whose files are not what their config.json says, family by family."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.data.model_files import read_json
from covey.models.fit import Fit, fit_of
from covey.quickstart.task import MODEL_DIR
from covey.weight_files import stored_tensors
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, random_model

# One whose layers covey knows from config.json, and two that transformers is asked for.
FAMILIES = ("llama", "gpt2", "mixtral")

Tensors = dict[str, torch.Tensor]


def saved(family: str, directory: Path, spoil: Callable[[Tensors], object] = len, **config: Any) -> Path:
    random_model(family).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = {**read_json(directory / "config.json"), **config}
    (directory / "config.json").write_text(json.dumps(said))
    return directory


def fit(directory: Path) -> Fit:
    return fit_of(directory, read_json(directory / "config.json"), stored_tensors(directory))


@pytest.mark.parametrize("family", [*STREAM_FAMILIES, *LEAKING_FAMILIES])
def test_a_saved_model_fits(family: str, tmp_path: Path) -> None:
    assert fit(saved(family, tmp_path)) == Fit()


def some_weight(tensors: Tensors) -> str:
    return next(
        n for n in sorted(tensors) if (".1." in n and n.endswith("norm.weight")) or "ln_1.weight" in n
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("mixtral", "num_hidden_layers")],
)
def test_more_layers_than_tensors_are_not_built(family: str, name: str, tmp_path: Path) -> None:
    directory = saved(family, tmp_path, **{name: 2_000})
    count = len(stored_tensors(directory))
    assert fit(directory).problem == f"config.json says 2000 layers, but the files have {count} tensors"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_is_missing(family: str, tmp_path: Path) -> None:
    lost: list[str] = []

    def spoil(tensors: Tensors) -> None:
        lost.append(some_weight(tensors))
        del tensors[lost[0]]

    problem = fit(saved(family, tmp_path, spoil)).problem
    assert problem is not None and "lack 1 tensor of a " in problem and lost[0] in problem


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_has_another_shape(family: str, tmp_path: Path) -> None:
    problem = fit(saved(family, tmp_path, lambda t: t.update({some_weight(t): torch.zeros(5)}))).problem
    assert problem is not None and " is 5, but config.json says 64" in problem and "lack" not in problem


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", {"num_hidden_layers": 2}, "layers that config.json does not have"),
        ("llama", {"num_hidden_layers": 4}, "lack 9 tensors"),
        ("gpt2", {"n_layer": 2}, "layers that config.json does not have"),
        ("llama", {"vocab_size": 300, "pad_token_id": 0}, "is 320x64, but config.json says 300x64"),
        ("qwen2", {"tie_word_embeddings": False}, "lack 1 tensor of a Qwen2ForCausalLM: lm_head.weight"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings: true"),
        ("llama", {"pad_token_id": 5000}, "cannot be built"),
        ("llama", {"num_attention_heads": 7}, "cannot be built"),
        ("qwen3", {"head_dim": 8}, "shapes in the files"),
    ],
)
def test_config_and_weights_of_two_models(
    family: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    problem = fit(saved(family, tmp_path, **config)).problem
    assert problem is not None and words in problem


def test_a_tied_head_may_be_saved_twice(tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert fit(saved("qwen2", tmp_path, copy)) == Fit()


def test_an_expert_is_missing(tmp_path: Path) -> None:
    problem = fit(
        saved("mixtral", tmp_path, lambda t: t.pop(next(n for n in t if "experts.2.w1" in n)))
    ).problem
    assert problem is not None and "experts" in problem


def test_weights_of_whole_numbers(tmp_path: Path) -> None:
    def round_off(tensors: Tensors) -> None:
        tensors.update({n: t.to(torch.int8) for n, t in tensors.items() if "proj" in n})

    problem = fit(saved("llama", tmp_path, round_off)).problem
    assert problem is not None and "stored as I8" in problem


def test_tensors_of_another_task_are_named(tmp_path: Path) -> None:
    found = fit(saved("llama", tmp_path, lambda t: t.update({"v_head.weight": torch.zeros(1, 64)})))
    assert found == Fit(unused=("v_head.weight",))


def test_no_tensor_at_all(tmp_path: Path) -> None:
    assert fit(saved("llama", tmp_path, lambda t: t.clear())).problem is not None


def test_a_known_family_is_looked_at_without_torch() -> None:
    program = (
        "import sys; from pathlib import Path; from covey.models.fit import Fit, fit_of;"
        "from covey.weight_files import stored_tensors; from covey.data.model_files import read_json;"
        "d = Path(sys.argv[1]);"
        "assert fit_of(d, read_json(d / 'config.json'), stored_tensors(d)) == Fit();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(MODEL_DIR)], check=True, timeout=60)
