"""What several ranks write of a model is what save_pretrained writes, and from_pretrained reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from covey.checkpoint import model_files
from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.model_files import ModelFiles
from covey.weight_files import INDEX, stored_tensors
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, random_model


def written(model: Any, directory: Path, world: int) -> dict[str, FileEntry]:
    """The files of all ranks, as DDP writes them; the last rank first."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = {}
    for rank in reversed(range(world)):
        entries |= ModelFiles(model, rank, world).add_all(model.named_parameters()).write(directory)
    return entries


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(str(f)).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []


@pytest.mark.parametrize("family", (*STREAM_FAMILIES, *LEAKING_FAMILIES))
def test_files_of_any_number_of_ranks_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path / "theirs")
    theirs = tensors_of(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    for world in (1, 3):
        ours = tmp_path / f"ours-{world}"
        entries = written(model, ours, world)
        assert_same(tensors_of(ours), theirs)
        assert json.loads((ours / "config.json").read_text()) == config
        stored = {n: t.file.name for n, t in stored_tensors(ours).items()}
        assert stored.keys() == theirs.keys()
        assert (ours / INDEX).exists() == (world > 1) and len(set(stored.values())) == world
        for name, entry in entries.items():
            data = (ours / name).read_bytes()
            assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        again, report = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_ranks_write_nearly_the_same_number_of_bytes(tmp_path: Path) -> None:
    entries = written(random_model("llama", num_hidden_layers=12), tmp_path, 2)
    sizes = [e.size for n, e in entries.items() if n != INDEX]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)


def test_weights_in_bfloat16_are_said_so(tmp_path: Path) -> None:
    """As a sharded backend gives them: a copy that is not there any more when it is written."""
    model = random_model("qwen2")
    for rank in range(2):
        files = ModelFiles(model, rank, 2)
        for name, parameter in model.named_parameters():
            whole = parameter.detach().bfloat16()
            files.add(name, whole)
        files.write(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    expected = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
    assert_same(tensors_of(tmp_path), expected)
    assert next(model.parameters()).dtype == torch.float32 and str(model.config.dtype) != "bfloat16"


def test_more_ranks_than_tensors(tmp_path: Path) -> None:
    model = random_model("llama", num_hidden_layers=1)
    num = len(list(model.named_parameters()))
    written(model, tmp_path, num + 5)
    assert len(list(tmp_path.glob("*.safetensors"))) == num
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None


class Fused(nn.Module):
    """Two layers, whose three tensors are one in the files: what is converted needs all of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(2, 2, bias=False) for n in "qkv"}) for _ in "ab"
        )
        self.head = nn.Linear(2, 2, bias=False)


def fuse(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("layers"):
            found[name] = tensor
        elif name.endswith("q.weight"):
            parts = [tensors[name.replace("q.weight", f"{part}.weight")] for part in "qkv"]
            found[name.replace("q.weight", "qkv.weight")] = torch.cat(parts)
    return found


def test_tensors_that_are_one_in_the_files_go_to_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_as_published", fuse)
    monkeypatch.setattr(model_files, "_write_config", lambda *given: None)
    model = Fused()
    written(model, tmp_path, 3)
    expected = fuse(model, {n: p.detach() for n, p in model.named_parameters()})
    assert_same(tensors_of(tmp_path), expected)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == set(expected)
