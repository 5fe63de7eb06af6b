"""Export: a merged model is the adapter, proven on files; another checkpoint loses its trainer only."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.checkpoint.read import verify
from covey.checkpoint.registry import State
from covey.checkpoint.write import write_checkpoint
from covey.errors import CheckpointError, CoveyError, DamagedModelError
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted, load_any, save_policy
from covey.training import export as module
from covey.training.export import export
from support.models import random_model, save_model

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=8)
KINDS = {
    "lora": LORA,
    "rslora": replace(LORA, use_rslora=True),
    "dora": replace(LORA, use_dora=True),
    "whole": replace(LORA, modules_to_save=("lm_head",)),
}


def base_of(family, directory, dtype=torch.float32):
    """A base in a dtype of its own, as models are published."""
    save_model(family, directory)
    random_model(family).to(dtype).save_pretrained(directory)
    return directory


def adapter_of(base, run, settings=LORA):
    """A whole checkpoint, with trainer state and manifest, of an adapter that has learnt something."""
    policy = load_adapted(
        base,
        settings,
        adapter=None,
        seed=0,
        compute_dtype=torch.float32,
        device=CPU,
        disable_dropout=True,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return write_checkpoint(
        run,
        step=40,
        write_model=lambda target: save_policy(policy, base, target),
        states={"progress": State(json={"step": 40})},
        meta={},
    )


@torch.no_grad()
def logits(model, seed=9):
    ids = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids).logits.float()


@pytest.mark.parametrize(
    ("family", "kind", "dtype", "limit"),
    [
        ("qwen2", "lora", torch.float32, 1e-4),
        ("qwen2", "dora", torch.bfloat16, 0.1),
        ("llama", "whole", torch.float32, 1e-4),
        ("gpt2", "rslora", torch.float32, 1e-4),
        ("mixtral", "lora", torch.float32, 1e-4),
    ],
)
def test_merged(family, kind, dtype, limit, tmp_path):
    base = base_of(family, tmp_path / "base", dtype)
    checkpoint = adapter_of(base, tmp_path / "run", KINDS[kind])
    result = export(checkpoint, tmp_path / "out", merge=True)
    assert (result.target, result.merged, result.num_prompts) == (tmp_path / "out", True, 6)
    assert result.dtype == str(dtype).removeprefix("torch.")
    assert 0 < result.max_logit_difference < limit
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = logits(load_any(checkpoint, device=CPU).model)
    assert (logits(model) - expected).norm() / expected.norm() < limit / 5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert (logits(plain) - expected).norm() / expected.norm() > 0.2
    with safe_open(str(tmp_path / "out" / "model.safetensors"), framework="pt") as file:
        assert {file.get_tensor(n).dtype for n in file.keys()} == {dtype}  # noqa: SIM118
    # Head and embedding stay one tensor where the base has one.
    assert model.config.tie_word_embeddings == plain.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1 + 1")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out", "run"]


def test_without_merge_the_adapter_is_copied(tmp_path):
    base = base_of("qwen2", tmp_path / "base")
    checkpoint = adapter_of(base, tmp_path / "run")
    result = export(checkpoint, tmp_path / "out", merge=False)
    assert (result.merged, result.num_prompts, result.dtype) == (False, 0, None)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in checkpoint.iterdir()} - {"trainer", "manifest.json"}
    assert torch.equal(
        logits(load_any(tmp_path / "out", device=CPU).model), logits(load_any(checkpoint, device=CPU).model)
    )


@pytest.mark.parametrize("merge", [False, True])
def test_a_whole_model_is_copied(merge, tmp_path):
    base = base_of("qwen2", tmp_path / "base")
    (base / "trainer").mkdir()
    (base / "trainer" / "state.json").write_text("{}")
    result = export(base, tmp_path / "out", merge=merge)
    assert (result.merged, result.max_logit_difference) == (False, 0.0)
    assert {p.name for p in base.iterdir()} - {p.name for p in result.target.iterdir()} == {"trainer"}
    assert (result.target / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    checkpoint = adapter_of(base_of("qwen2", tmp_path / "base"), tmp_path / "run")
    path = checkpoint / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[next(iter(tensors))] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        export(checkpoint, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("lost", ["trainer", "trainer/state.json"])
def test_what_only_a_resume_needs_is_not_asked_for(merge, lost, tmp_path):
    checkpoint = adapter_of(base_of("qwen2", tmp_path / "base"), tmp_path / "run")
    path = checkpoint / lost
    shutil.rmtree(path) if path.is_dir() else path.write_text("{")
    assert export(checkpoint, tmp_path / "out", merge=merge).merged is merge
    with pytest.raises(CheckpointError):
        verify(checkpoint)


DAMAGED = {
    "no config": lambda model: (model / "config.json").unlink(),
    "another config": lambda model: (model / "config.json").write_text("[]"),
    "no weights": lambda model: (model / "model.safetensors").write_text(""),
    "a directory of weights": lambda model: [
        (model / "model.safetensors").unlink(),
        (model / "model.safetensors").mkdir(),
    ],
    "sizes": lambda model: (model / "config.json").write_text(
        (model / "config.json").read_text().replace('"intermediate_size": ', '"intermediate_size": 1')
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_model_is_not_exported(case, tmp_path):
    """Neither by itself, nor as the base of an adapter."""
    base = base_of("qwen2", tmp_path / "base")
    checkpoint = adapter_of(base, tmp_path / "run")
    before = {path.name for path in tmp_path.iterdir()}
    DAMAGED[case](base)
    with pytest.raises(DamagedModelError, match="base: "):
        export(base, tmp_path / "out", merge=False)
    with pytest.raises(CheckpointError, match="base"):
        export(checkpoint, tmp_path / "out", merge=True)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_merge_in_float32_keeps_all_of_the_update(tmp_path):
    checkpoint = adapter_of(base_of("qwen2", tmp_path / "base", torch.bfloat16), tmp_path / "run")
    rounded = export(checkpoint, tmp_path / "low", merge=True)
    whole = export(checkpoint, tmp_path / "high", merge=True, torch_dtype="float32")
    assert (rounded.dtype, whole.dtype) == ("bfloat16", "float32")
    assert whole.max_logit_difference < rounded.max_logit_difference / 100
    expected = logits(load_any(checkpoint, device=CPU).model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "high").eval()
    assert model.dtype == torch.float32
    assert (logits(model) - expected).norm() / expected.norm() < 1e-5


def test_the_base_may_have_moved(tmp_path):
    base = base_of("qwen2", tmp_path / "base")
    checkpoint = adapter_of(base, tmp_path / "run")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="give its location"):
        export(checkpoint, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    assert export(checkpoint, tmp_path / "out", merge=True, base=moved).max_logit_difference < 1e-4


def test_an_existing_directory_is_left_alone(tmp_path):
    base = base_of("qwen2", tmp_path / "base")
    (tmp_path / "out").mkdir()
    with pytest.raises(CoveyError, match="out exists already; name a directory"):
        export(base, tmp_path / "out", merge=False)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_wrong_merge_is_found(kind, tmp_path, monkeypatch):
    # The proof must fail where the update is left out, or added twice.
    checkpoint = adapter_of(base_of("qwen2", tmp_path / "base"), tmp_path / "run", KINDS[kind])
    merge = module.merge_into_base
    for factor in (0.0, 2.0):

        def wrong(policy, factor=factor):
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if ".lora_B." in name:
                        parameter *= factor
            return merge(policy)

        monkeypatch.setattr(module, "merge_into_base", wrong)
        with pytest.raises(CoveyError, match=r"merging the adapter changed its logits"):
            export(checkpoint, tmp_path / "out", merge=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "run"]


def test_an_odd_dtype_is_refused(tmp_path):
    base = base_of("qwen2", tmp_path / "base")
    checkpoint = adapter_of(base, tmp_path / "run")
    tensors = {n: t.double() for n, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CoveyError, match="stored as F64"):
        export(checkpoint, tmp_path / "out", merge=True)
