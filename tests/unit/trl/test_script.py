"""The classes and functions of a script of TRL: arguments, mixtures, adapters and quantization."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from covey.checks.objects.configs import with_options_of_configs
from covey.trl import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
    is_conversational,
)

NAMES = json.loads(Path(__file__).parents[1].joinpath("config", "other_tools.json").read_text())


def test_the_fields_are_those_of_trl_with_its_defaults() -> None:
    of_script = asdict(ModelConfig()) | asdict(ScriptArguments()) | asdict(DatasetMixtureConfig())
    of_grpo = {"reward_model_name_or_path", "reward_funcs"}  # of its own script
    assert of_script == {name: v for name, v in NAMES["script"].items() if name not in of_grpo}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Ten rows and four."""
    for name, num_rows in (("a", 10), ("b", 4)):
        rows = [json.dumps({"prompt": f"{name}{i}", "more": i}) for i in range(num_rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def mixture(files: list[str], fractions: Any = (None, None), **options: Any) -> DatasetMixtureConfig:
    parts = [
        {"path": "json", "data_files": file, "columns": ["prompt"], "fraction": fraction}
        for file, fraction in zip(files, fractions, strict=True)
    ]
    return DatasetMixtureConfig(datasets=parts, **options)  # type: ignore[arg-type]


def test_a_mixture(files: list[str]) -> None:
    config = mixture(files)
    assert isinstance(config.datasets[0], DatasetConfig) and config.datasets[0].split == "train"
    whole = get_dataset(config)
    assert list(whole) == ["train"] and whole["train"].column_names == ["prompt"]
    assert whole["train"]["prompt"][:1] + whole["train"]["prompt"][-1:] == ["a0", "b3"]
    assert len(whole["train"]) == 14
    split = get_dataset(mixture(files, test_split_size=0.5))
    assert (len(split["train"]), len(split["test"])) == (7, 7)
    streamed = get_dataset(mixture(files, streaming=True))["train"]
    assert [row["prompt"] for row in streamed][9:11] == ["a9", "b0"]


def test_shares_of_a_mixture(files: list[str]) -> None:
    # Half of each: all 4 rows of the smaller one, so 4 of the larger one too. 3 to 1: 4 / 0.25 = 16 rows in
    # all would need 12 of 10, so there are 10 / 0.75 = 13.3, which are 10 and round(3.3) = 3.
    for fractions, rows in (((1, 1), (4, 4)), ((0.75, 0.25), (10, 3)), ((1, 0), (10, 0))):
        prompts = get_dataset(mixture(files, fractions))["train"]["prompt"]
        assert tuple(sum(p[0] == name for p in prompts) for name in "ab") == rows
    for wrong in (mixture(files, (1, None)), mixture(files, (1, 1), streaming=True), DatasetMixtureConfig()):
        with pytest.raises(ValueError, match="data set"):
            get_dataset(wrong)


def test_an_adapter_is_taken_by_covey() -> None:
    assert get_peft_config(ModelConfig()) is None
    config = get_peft_config(ModelConfig(use_peft=True, lora_r=8, lora_target_modules=["all-linear"]))
    assert config is not None and (config.r, config.lora_alpha, config.lora_dropout) == (8, 32, 0.05)
    options, problems = with_options_of_configs({"peft_config": config})
    assert problems == []
    assert options["lora_rank"] == 8 and options["tuner_type"] == "lora"
    assert options["target_modules"] == "all-linear"
    named = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"]))
    assert named is not None and set(named.target_modules) == {"q_proj", "v_proj"}


def test_quantization() -> None:
    assert get_quantization_config(ModelConfig()) is None
    four = get_quantization_config(
        ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True)
    )
    assert four is not None and four.load_in_4bit and four.bnb_4bit_use_double_quant
    assert str(four.bnb_4bit_compute_dtype) == "torch.bfloat16" and four.bnb_4bit_quant_type == "nf4"
    eight = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert eight is not None and eight.load_in_8bit and not eight.load_in_4bit
    with pytest.raises(ValueError, match="both"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)


def test_the_device_of_a_quantized_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert get_kbit_device_map() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert get_kbit_device_map() == {"": 0}


@pytest.mark.parametrize(
    ("row", "has_messages"),
    [
        ({"prompt": [{"role": "user", "content": "a"}]}, True),
        ({"messages": [{"role": "user", "content": "a"}], "n": 1}, True),
        ({"prompt": "a"}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": []}, False),
        ({"other": [{"role": "user"}]}, False),
    ],
)
def test_rows_with_messages(row: dict[str, Any], has_messages: bool) -> None:
    assert is_conversational(row) is has_messages


def test_nothing_foreign_is_imported() -> None:
    """By all names and what they do; peft, and transformers' own models, import accelerate, so an adapter and
    the trainer come last."""
    code = """
import sys
from covey.trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from covey.trl import get_kbit_device_map, get_peft_config, get_quantization_config
FOREIGN = ("trl", "swift", "transformers.trainer", "transformers.training_args")
def found(*names):
    return [m for m in sys.modules for n in names if m == n or m.startswith((n + ".", n + "_"))]
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
_, config, model = parser.parse_args_and_config(["--output_dir", "a", "--load_in_4bit"])
config.device, config.to_json_string(), get_kbit_device_map(), get_quantization_config(model)
assert not get_peft_config(model)
assert not found(*FOREIGN, "accelerate"), found(*FOREIGN, "accelerate")
model.use_peft = True
assert get_peft_config(model)
from covey.trl import *
assert not found(*FOREIGN), found(*FOREIGN)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
