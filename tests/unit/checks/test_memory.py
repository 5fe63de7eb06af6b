"""What the memory forecast is told of a model and of the machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.checks.model import memory
from covey.checks.model.memory import free_memory, model_sizes
from covey.models.adapter_shapes import LoraSettings, ModelShapes, facts_of
from covey.plan.facts import ModelSizes

GB = 10**9
LAYER = "model.layers.0"
SHAPES = ModelShapes(
    tensors={
        "model.embed_tokens.weight": (100, 8),
        f"{LAYER}.self_attn.q_proj.weight": (8, 8),
        f"{LAYER}.mlp.down_proj.weight": (8, 16),
        "model.norm.weight": (8,),
    },
    vocab_size=100,
    tied=True,
)
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


def sizes(place: Path, config: dict[str, Any], **settings: Any) -> ModelSizes | None:
    """What is read where config.json says this."""
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model_sizes(place, SHAPES, facts_of(SHAPES, LoraSettings(rank=2, alpha=4.0, **settings)))


def test_sizes_of_a_model(tmp_path: Path) -> None:
    assert sizes(tmp_path, CONFIG) == ModelSizes(
        family="qwen2",
        layers=1,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_width=4,
        intermediate=16,
        vocabulary=100,
        tied=True,
        parameters=800 + 64 + 128 + 8,
        adapted=("down_proj", "q_proj"),
        adapted_parameters=64 + 128,
        adapter_parameters=2 * (8 + 8) + 2 * (8 + 16),
        packable_parameters=64 + 128,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": 6}, {"head_width": 6}),
        ({"num_key_value_heads": None}, {"kv_heads": 2}),
        ({"intermediate_size": None}, {"intermediate": 32}),
        ({"num_experts_per_tok": 4}, {"intermediate": 64}),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 5}, {"intermediate": 20}),
    ],
)
def test_what_a_configuration_may_say(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, int]
) -> None:
    found = sizes(tmp_path, {**CONFIG, **changes})
    assert {name: getattr(found, name) for name in expected} == expected


def test_older_names_and_nested_ones(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 2, "n_inner": None}
    found = sizes(tmp_path, gpt2)
    assert found is not None
    assert (found.layers, found.hidden, found.heads, found.intermediate) == (3, 8, 2, 32)
    outer = {"model_type": "pair", "text_config": {k: v for k, v in CONFIG.items() if k != "model_type"}}
    nested = sizes(tmp_path, outer)
    assert nested is not None
    assert (nested.family, nested.hidden) == ("pair", 8)


def test_a_configuration_without_widths_says_nothing(tmp_path: Path) -> None:
    assert sizes(tmp_path, {"model_type": "qwen2"}) is None


def test_copies_and_adapters_by_name(tmp_path: Path) -> None:
    found = sizes(tmp_path, CONFIG, target_modules=("q_proj",), modules_to_save=("norm",))
    assert found is not None
    assert (found.adapted, found.adapted_parameters) == (("q_proj",), 64)
    assert found.saved_parameters == 8


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8,000,000 kB to have, and no limit on its container."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    (tmp_path / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n")
    return tmp_path


def group(machine: Path, names: tuple[str, str, str], limit: str, used: int, droppable: str) -> None:
    for name, text in zip(names, (limit, str(used), f"anon 5\n{droppable}\n"), strict=True):
        path = machine / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")


def test_memory_of_a_machine(machine: Path) -> None:
    assert free_memory(cuda=False) == 8_000_000 * 1024


def test_memory_of_a_container(machine: Path) -> None:
    """2 GB of its 4 are used, of which 1 can be dropped."""
    group(machine, V2, str(4 * GB), 2 * GB, f"inactive_file {GB}")
    assert free_memory(cuda=False) == 3 * GB


def test_memory_of_a_container_of_version_1(machine: Path) -> None:
    group(machine, V1, str(4 * GB), 2 * GB, f"total_inactive_file {GB}")
    assert free_memory(cuda=False) == 3 * GB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_container_without_a_limit(machine: Path, limit: str) -> None:
    group(machine, V2, limit, 2 * GB, "inactive_file 0")
    assert free_memory(cuda=False) == 8_000_000 * 1024


def test_a_container_that_is_full(machine: Path) -> None:
    group(machine, V2, str(GB), GB + 1, "inactive_file 0")
    assert free_memory(cuda=False) == 0


def test_a_machine_that_does_not_say(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert free_memory(cuda=False) is None


def tool(machine: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """What nvidia-smi answers."""
    path = machine / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")


def test_memory_of_gpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU with the least, among those that are shown."""
    tool(machine, monkeypatch, 'case "$*" in *--id=2,3*) echo 500; echo 400;; *) echo 1;; esac')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert free_memory(cuda=True) == 400 << 20


@pytest.mark.parametrize("script", ["echo 7.5", "exit 9", "true"])
def test_gpus_whose_tool_does_not_say(machine: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool(machine, monkeypatch, script)
    assert free_memory(cuda=True) is None
