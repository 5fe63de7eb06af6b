"""What is wrong with a model's directory, case by case, without reading weights."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from covey.data.config_values import impossible_size
from covey.data.model_files import model_context, model_problem
from covey.data.model_types import known_model_types
from covey.quickstart.task import MODEL_DIR


@pytest.fixture
def whole(model_dir):
    """A directory with nothing wrong: `whole(**fields of config.json)`."""

    def make(**config):
        directory = model_dir(config=config)
        no_tensor(directory / "model.safetensors")
        return directory

    return make


def no_tensor(path):
    """A file of weights with a header and nothing behind it."""
    path.write_bytes((2).to_bytes(8, "little") + b"{}")


def kind(directory, **options):
    found = model_problem(directory, **options)
    return None if found is None else found.kind


def test_a_good_directory(whole):
    assert model_problem(MODEL_DIR) is None
    assert model_problem(whole()) is None


def test_files_that_are_missing_or_broken(whole, tmp_path):
    assert kind(tmp_path / "nowhere") == "not_a_directory"
    directory = whole()
    (directory / "model.safetensors").unlink()
    assert kind(directory) == "no_weights"
    assert kind(directory, with_weights=False) is None
    (directory / "tokenizer.json").unlink()
    assert kind(directory) == "no_tokenizer"
    (directory / "config.json").write_text("{")
    assert kind(directory) == "bad_config"
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text("{")
    assert str(model_problem(directory)).startswith(f"{directory}/generation_config.json is not valid JSON")
    (directory / "config.json").write_text("[1]")
    assert kind(directory) == "bad_config"
    (directory / "config.json").unlink()
    assert kind(directory) == "no_config"
    assert str(model_problem(directory)) == f"{directory} has no config.json"
    (directory / "checkpoint-9").mkdir()
    (directory / "checkpoint-10").mkdir()
    found = model_problem(directory)
    assert found is not None
    assert (found.kind, found.command) == ("run", str(directory / "checkpoint-10"))


def test_a_slow_tokenizer_says_how_to_convert_it(whole):
    directory = whole()
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    found = model_problem(directory)
    assert found.kind == "slow_tokenizer"
    call = f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"
    assert "only tokenizer.model" in found.words
    assert call in found.words


def test_pickled_weights(whole):
    directory = whole()
    (directory / "model.safetensors").rename(directory / "pytorch_model-00001-of-00002.bin")
    (directory / "training_args.bin").touch()
    found = model_problem(directory)
    assert found.kind == "pickled_weights"
    assert "pytorch_model-00001-of-00002.bin" in found.words
    assert "convert them to safetensors" in str(found) and "convert" not in found.words


def test_missing_shards_are_named(whole):
    directory = whole()
    (directory / "model.safetensors").unlink()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}))
    no_tensor(directory / shards[0])
    assert str(model_problem(directory)) == f"{directory} lacks 1 of 2 weight files: {shards[1]}"
    no_tensor(directory / shards[1])
    assert "says that a is in" in str(model_problem(directory))
    index.write_text("{}")
    assert kind(directory) == "damaged"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes (4bit)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq (4 bits)"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"weights": {}}, "an unnamed method"),
    ],
)
def test_quantized_weights_are_named(whole, key, said, words):
    found = model_problem(whole(**{key: said}), with_weights=False)
    assert found.kind == "quantized"
    assert found.words.endswith(words)
    assert model_problem(whole(**{key: {}})) is None


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-q4.gguf"])
def test_files_that_nothing_loads(whole, name):
    directory = whole()
    (directory / "model.safetensors").rename(directory / name)
    found = model_problem(directory)
    assert found.kind == "unread_weights"
    assert name in found.words


def test_an_adapter_names_its_base(tmp_path, whole):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')
    (tmp_path / "adapter_model.safetensors").touch()
    found = model_problem(tmp_path)
    assert found.kind == "adapter"
    assert "give Qwen/Qwen2.5-0.5B as --model" in found.words
    assert "covey export --merge" in found.words
    # The base's config beside it makes no model of it.
    directory = whole()
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("{")
    assert kind(directory) == "adapter"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vision_config": {"depth": 1}}, "vision"),
        ({"audio_config": {}}, "vision"),
        ({"image_token_id": 7}, "vision"),
        ({"vision_config": None}, None),
        ({"is_encoder_decoder": True}, "encoder_decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "not_causal"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "not_causal"),
        ({"architectures": ["GPT2LMHeadModel"]}, None),
        ({"architectures": None}, None),
        ({"model_type": "qwen9"}, "unknown_model_type"),
        ({"model_type": None}, "no_model_type"),
        ({"model_type": "internlm", "auto_map": {"AutoConfig": "x.Y"}}, "remote_code"),
        # transformers' own code is used for a type that it knows, whatever else comes with the model.
        ({"auto_map": {"AutoConfig": "x.Y"}}, None),
    ],
)
def test_models_that_are_not_trained(config, expected, whole):
    assert kind(whole(**config)) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be from 1 to 2,000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, but"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000"),
        ({"num_hidden_layers": 1e300}, "num_hidden_layers is 1e+300, which is no whole"),
        ({"num_hidden_layers": math.nan}, "num_hidden_layers is nan, which is no whole"),
        ({"num_hidden_layers": "1000000000"}, "num_hidden_layers is '1000000000', which is no whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, which is no whole number"),
        ({"n_layer": 10**9}, "n_layer is 1000000000, but"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000, but"),
        ({"intermediate_size": [384, 10**12]}, "intermediate_size is 1000000000000, but"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but"),
        ({"vocab_size": -3}, "vocab_size is -3, but"),
        ({"num_experts": 10**9}, "num_experts is 1000000000, but"),
        ({"num_hidden_layers": 2_000, "num_experts": 0, "head_dim": None, "intermediate_size": [1, 2]}, None),
    ],
)
def test_sizes_that_no_model_has(config, words, whole):
    said = impossible_size(config)
    assert said is None if words is None else words in said
    found = model_problem(whole(**config))
    assert (found is None) == (words is None)
    if words is not None:
        assert found.kind == "weights" and f"config.json: {words}" in found.words


def test_an_unknown_model_type_names_the_nearest(whole):
    assert "(nearest: mistral)" in str(model_problem(whole(model_type="mistrall")))


def test_the_known_model_types_are_transformers_own():
    code = "from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as n; print(*n)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert known_model_types() >= set(done.stdout.split())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 99}, "max_position_embeddings": 5}, 99),
        ({}, None),
    ],
)
def test_the_models_context(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context(tmp_path) == expected
