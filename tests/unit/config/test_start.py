"""What follows from an adapter that a run starts from, and every way in which one cannot be used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from covey.config import from_dict
from covey.config.resolve import Resolved

BODY: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/base",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "bias": "none",
    "init_lora_weights": True,
    "target_modules": ["v_proj", "q_proj"],
    "megatron_core": "megatron.core",
    "rank_pattern": {},
}
MODULES = [f"layers.{n}.self_attn.{leaf}" for n in (0, 1) for leaf in ("q_proj", "v_proj")]


def adapter(directory: Path, modules: list[str] = MODULES, **changes: Any) -> Path:
    """The files of an adapter; its header alone is read, and the tensors are empty."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**BODY, **changes}))
    names = [f"base_model.model.model.{m}.lora_{side}.weight" for m in modules for side in "AB"]
    header = json.dumps({n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in names}).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def resolved(**options: Any) -> Resolved:
    base = {"model": "some/base", "dataset": ["d.jsonl"], "reward_funcs": ["accuracy"]}
    return from_dict({**base, **options})


def codes(found: Resolved) -> list[tuple[str, str]]:
    return [(p.code, p.option) for p in found.problems if p.severity == "error"]


def test_the_adapter_decides_its_shape(tmp_path: Path) -> None:
    path = adapter(tmp_path / "sft", use_rslora=True)
    found = resolved(adapters=str(path))
    config = found.config
    assert codes(found) == []
    assert (config.tuner_type, config.lora_rank, config.lora_alpha) == ("lora", 4, 8.0)
    assert (config.target_modules, config.use_rslora, config.lora_dropout) == (
        ["q_proj", "v_proj"],
        True,
        0.05,
    )
    assert found.sources["lora_rank"] == f"adapter_config.json of {path}"
    assert config.learning_rate == 1e-5  # as with any LoRA


def test_a_directory_of_an_adapter_as_the_model(tmp_path: Path) -> None:
    """Its base becomes the model; a checkpoint with a config.json beside the adapter is a model."""
    path = adapter(tmp_path / "checkpoint-40")
    config = resolved(model=str(path)).config
    assert (config.model, config.adapters, config.tuner_type) == ("some/base", str(path), "lora")
    (path / "config.json").write_text("{}")
    config = resolved(model=str(path)).config
    assert (config.model, config.adapters, config.tuner_type) == (str(path), None, "full")


@pytest.mark.parametrize("verb", ["train", "rlhf"])
def test_the_reference_of_the_dialects(verb: str, tmp_path: Path) -> None:
    """TRL's is the start, ms-swift's the base; ms-swift's defaults of LoRA give way to the adapter."""
    path = adapter(tmp_path / "sft")
    asked = {"rlhf_type": "grpo"} if verb == "rlhf" else {}
    found = resolved(adapters=str(path), **asked)
    assert codes(found) == []
    assert found.config.ref_adapters == ("base" if verb == "rlhf" else "start")
    assert (found.config.lora_rank, found.config.lora_alpha) == (4, 8.0)
    said = " ".join(p.seen for p in found.problems if p.code == "W113")
    assert "lora_rank" not in said
    assert ("ref_adapters" in said) == (verb == "rlhf")


@pytest.mark.parametrize(
    "option",
    [
        {"lora_rank": 16},
        {"lora_alpha": 16},
        {"use_dora": True},
        {"target_modules": ["q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"tuner_type": "full"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_a_typed_value_that_differs_is_named_with_the_adapters(
    option: dict[str, Any], tmp_path: Path
) -> None:
    path = adapter(tmp_path / "sft")
    found = resolved(adapters=str(path), **option)
    assert codes(found) == [("E382", next(iter(option)))]
    (problem,) = [p for p in found.problems if p.code == "E382"]
    assert str(path) in problem.seen
    assert problem.fixes
    mended = resolved(adapters=str(path), **{**option, **problem.fixes[0].edits})
    assert codes(mended) == [] or not problem.fixes[0].edits


def test_equal_values_and_a_dropout_of_ones_own_are_taken(tmp_path: Path) -> None:
    path = adapter(tmp_path / "sft")
    typed = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    found = resolved(adapters=str(path), tuner_type="lora", **typed)
    assert codes(found) == []
    assert found.config.lora_dropout == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"peft_type": "ADALORA"}, "peft_type ADALORA"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS"),
        ({"bias": "lora_only"}, "bias lora_only"),
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 16}}, "alpha_pattern"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"use_qalora": True}, "use_qalora"),
        ({"a_field_of_tomorrow": {"on": 1}}, "a_field_of_tomorrow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_kind_of_adapter_is_refused_by_its_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "sft", **changes)
    found = resolved(adapters=str(path))
    assert codes(found) == [("E381", "adapters")]
    assert words in found.problems[0].seen
    assert codes(resolved(model=str(path))) == [("E381", "model")]


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 8}},
        {"init_lora_weights": "gaussian", "fan_in_fan_out": True, "eva_config": {"rho": 2.0}},
        {
            "auto_mapping": {"base_model_class": "Qwen2ForCausalLM"},
            "task_type": None,
            "runtime_config": {"a": 1},
        },
    ],
)
def test_what_changes_nothing_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    assert codes(resolved(adapters=str(adapter(tmp_path / "sft", **changes)))) == []


def test_modules_that_peft_found_in_another_way_are_taken_from_the_weights(tmp_path: Path) -> None:
    """A pattern, some layers, or a name that fits too little mean what the file has; names that fit nothing
    in it meant nothing."""
    whole = [f"model.{m}" for m in MODULES]
    pattern = adapter(tmp_path / "a", target_modules=r".*(q|v)_proj")
    assert resolved(adapters=str(pattern)).config.target_modules == whole
    layers = adapter(tmp_path / "b", MODULES[:2], layers_to_transform=[0])
    assert resolved(adapters=str(layers)).config.target_modules == whole[:2]
    more = adapter(tmp_path / "c", target_modules=["q_proj", "v_proj", "c_attn"])
    assert resolved(adapters=str(more)).config.target_modules == ["q_proj", "v_proj"]


def test_directories_that_hold_no_adapter(tmp_path: Path) -> None:
    """Each is E380; a fix for what is on a hub, for a pickled file, and for one directory too high."""
    inner = adapter(tmp_path / "run" / "default")
    empty, pickled, damaged = (tmp_path / name for name in ("empty", "pickled", "damaged"))
    empty.mkdir()
    adapter(pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    adapter(damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 9)
    said = {}
    for name in (str(empty), str(pickled), str(damaged), str(inner.parent), "someone/adapter"):
        found = resolved(adapters=name)
        assert codes(found) == [("E380", "adapters")]
        said[name] = found.problems[0]
    assert str(inner) in said[str(inner.parent)].seen
    assert "save_pretrained" in said[str(pickled)].fixes[0].text
    assert "hf download someone/adapter" in said["someone/adapter"].fixes[0].text


def test_more_than_one_adapter_is_refused(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    found = resolved(adapters=[str(one), str(two)])
    assert codes(found) == [("E103", "adapters")]
    assert str(two) in found.problems[0].seen
    assert codes(resolved(model=str(one), adapters=str(two))) == [("E106", "adapters")]
    assert codes(resolved(model=str(one), adapters=str(one))) == []


def test_a_base_that_is_not_here_is_named(tmp_path: Path) -> None:
    gone = adapter(tmp_path / "gone", base_model_name_or_path=str(tmp_path / "no" / "base"))
    unnamed = adapter(tmp_path / "unnamed", base_model_name_or_path=None)
    for path in (gone, unnamed):
        found = resolved(model=str(path))
        assert codes(found) == [("E301", "model")]
        assert f"--model BASE --adapters {path}" in found.problems[0].fixes[0].text
        assert codes(resolved(adapters=str(path))) == []


def test_values_of_another_runs_file_give_way_to_the_flag(tmp_path: Path) -> None:
    """A whole config.yaml has the defaults of LoRA in it, which nobody chose for this adapter."""
    from covey.config.flags import parse
    from covey.config.resolve import resolve
    from covey.config.write import to_yaml

    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(resolved(output_dir="runs/a")))
    path = adapter(tmp_path / "sft")
    parsed = parse([str(file), "--adapters", str(path)], "train")
    found = resolve(parsed.typed, 1, parsed.problems)
    assert codes(found) == []
    assert (found.config.tuner_type, found.config.lora_rank) == ("lora", 4)
