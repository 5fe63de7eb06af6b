"""A policy that is split over ranks: it has the weights of its files, and a rank reads its own rows alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.errors import ConfigError
from covey.learner.backends.base import Annotation
from covey.learner.backends.fsdp2 import FSDP2Backend
from covey.learner.sharding import rows
from covey.learner.sharding.build import meta_policy, sharded_policy
from covey.learner.sharding.layers import decoder_layers
from covey.learner.sharding.meta import meta_model, read_buffers
from covey.learner.sharding.reference import SplitReference
from covey.learner.sharding.units import Sharded, sharding_over
from covey.learner.sharding.weight_buffer import WeightBuffer
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted, read_policy
from covey.models.lora import adapter_alone
from covey.models.probe import micro_of
from covey.plan.layout import Layout
from covey.text_files import TextFiles
from support.models import random_model, save_model
from support.options import algorithm
from support.processes import run_in_processes
from support.rows import random_rows
from support.steps import OPTIMIZER

LAYOUT = Layout(num_gpus=2, gpu_bytes=0, is_here=True, zero_stage=3, fsdp=True)
CPU = torch.device("cpu")
ANNOTATIONS: tuple[Annotation, ...] = ("old", "reference")


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split(base: Path, lora: LoraSettings | None = None, dtype: torch.dtype = torch.float32) -> Sharded:
    """The policy of a directory over the ranks of this group."""
    meta = meta_policy(base, lora, adapter=None, seed=3, dtype=dtype, trust_remote_code=False)
    return sharded_policy(meta, base, sharding_over(LAYOUT, CPU), dtype, trust_remote_code=False)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2", "gpt2", "mixtral", "lfm2"])
def test_the_weights_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    expected = dict(read_policy(tmp_path, False).named_parameters())
    sharded = split(tmp_path)
    found = {name: weight.clone() for name, weight in sharded.whole()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert len(decoder_layers(sharded.policy)) == 3


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "lfm2"])
def test_a_model_without_weights_has_its_buffers(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    expected = dict(read_policy(tmp_path, False).model.named_buffers())
    meta = meta_model(tmp_path, False)
    found = dict(meta.named_buffers())
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_buffers_that_a_model_is_saved_with_are_read(tmp_path: Path) -> None:
    """Such as the biases of a router, which start as zeros."""
    save_model("qwen2", tmp_path)
    name = "model.rotary_emb.inv_freq"
    meta = meta_model(tmp_path, False)
    meta.get_submodule("model.rotary_emb")._non_persistent_buffers_set.clear()
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.full_like(meta.get_buffer(name), 7.0)}, file)
    read_buffers(meta, tmp_path)
    assert torch.equal(meta.get_buffer(name), torch.full_like(meta.get_buffer(name), 7.0))


def test_a_unit_that_would_train_in_two_dtypes_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    lora = LoraSettings(rank=4, alpha=8, modules_to_save=("input_layernorm",))
    with pytest.raises(ConfigError, match="E115 modules_to_save"):
        split(tmp_path, lora, torch.bfloat16)
    assert split(tmp_path, lora, torch.float32).parameters


def test_a_new_adapter_is_that_of_a_whole_model(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    lora = LoraSettings(rank=4, alpha=8, modules_to_save=("norm",))
    whole = load_adapted(
        tmp_path,
        lora,
        adapter=None,
        seed=3,
        compute_dtype=torch.bfloat16,
        device=CPU,
        disable_dropout=True,
    )
    expected = dict(whole.named_parameters())
    sharded = split(tmp_path, lora, torch.bfloat16)
    found = {name: weight.clone() for name, weight in sharded.whole()}
    assert found.keys() == expected.keys()
    assert {n: p.requires_grad for n, p in sharded.parameters.items()} == {
        n: p.requires_grad for n, p in expected.items()
    }
    assert all(torch.equal(found[name].float(), weight.float()) for name, weight in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_alone_is_that_of_a_whole_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its base, and its matrices with their scale."""
    save_model("llama", tmp_path)
    lora = LoraSettings(rank=4, alpha=12)
    how = {"compute_dtype": dtype, "device": CPU, "disable_dropout": True}
    whole = adapter_alone(load_adapted(tmp_path, lora, adapter=None, seed=3, **how))
    sampler = meta_policy(tmp_path, lora, adapter=None, seed=3, dtype=dtype, trust_remote_code=False).policy
    sharded = split(tmp_path, lora, dtype)
    own = FSDP2Backend(sharded, sampler, OPTIMIZER, compute_dtype=dtype).adapter_alone
    assert whole is not None and own is not None and own.rank == whole.rank == 4
    for given, found in ((whole.base, own.base), (whole.matrices, own.matrices)):
        expected = {name: tensor.clone() for name, tensor in given(None)}
        held = {name: tensor.clone() for name, tensor in found(None)}
        assert held.keys() == expected.keys() and len(held) > 20
        assert {t.dtype for t in held.values()} == {dtype}
        assert all(torch.equal(held[name], expected[name]) for name in held)


def test_a_reference_that_follows_begins_as_a_new_adapter_of_dora(tmp_path: Path) -> None:
    """Whose magnitudes are norms of whole weights, which are gathered once the reference is there."""
    save_model("llama", tmp_path)
    lora = LoraSettings(rank=4, alpha=8, use_dora=True)
    sharded = split(tmp_path, lora)
    sampler = meta_policy(
        tmp_path, lora, adapter=None, seed=3, dtype=torch.float32, trust_remote_code=False
    ).policy
    follows = algorithm(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    moving = SplitReference(sharded, follows)
    backend = FSDP2Backend(sharded, sampler, OPTIMIZER, compute_dtype=torch.float32, moving=moving)
    micros = [micro_of(random_rows((5, (7,))), "padded", CPU)]
    old, reference = (backend.annotate(micros, which, lambda: None) for which in ANNOTATIONS)
    assert torch.equal(old, reference) and float(old.std()) > 0.01


def test_a_model_of_a_program_is_copied_without_its_weights() -> None:
    model = random_model("qwen2")
    meta = meta_model(model, False)
    assert all(p.is_meta for p in meta.parameters()) and not any(p.is_meta for p in model.parameters())
    assert meta.get_input_embeddings().weight is meta.get_output_embeddings().weight


def report(base: Path, out: Path) -> None:
    """What this rank of two has read, and what it holds."""
    dist.init_process_group("gloo")
    read: dict[str, int] = {}
    plain = rows.FileRows.read

    def counted(self: rows.FileRows, name: str, first: int, last: int) -> Tensor:
        part = plain(self, name, first, last)
        read[name] = read.get(name, 0) + part.numel()
        return part

    rows.FileRows.read = counted  # type: ignore[method-assign]
    sharded = split(base)
    held = {n.removeprefix("model."): p.to_local().numel() for n, p in sharded.parameters.items()}
    found = {"read": read, "held": held, "sizes": {n: p.numel() for n, p in sharded.parameters.items()}}
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.multi
def test_a_rank_reads_its_own_rows_alone(tmp_path: Path) -> None:
    base = tmp_path / "model"
    save_model("llama", base)
    run_in_processes(__file__, str(base), str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert rank["read"] == {name: number for name, number in rank["held"].items() if number}
    whole = sum(ranks[0]["sizes"].values())
    assert [sum(rank["read"].values()) for rank in ranks] == [whole // 2, whole // 2]


if __name__ == "__main__":
    report(Path(sys.argv[1]), Path(sys.argv[2]))


@pytest.mark.parametrize(
    "lora",
    [None, LoraSettings(rank=4, alpha=8), LoraSettings(rank=4, alpha=8, use_dora=True)],
    ids=["full", "lora", "dora"],
)
def test_nothing_gathers_the_whole_model(
    lora: LoraSettings | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout, weights and the files of an adapter: at most what is outside of the layers, and two layers."""
    save_model("llama", tmp_path, num_hidden_layers=6)
    held, most, unit = [0], [0], Sharded.unit

    @contextmanager
    def counted(self: Sharded, name: str) -> Iterator[dict[str, Tensor]]:
        with unit(self, name) as tensors:
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            held[0] += num_bytes
            most[0] = max(most[0], held[0])
            yield tensors
            held[0] -= num_bytes

    def refused(self: WeightBuffer, weights: object) -> None:
        raise AssertionError("a whole copy was gathered")

    monkeypatch.setattr(Sharded, "unit", counted)
    monkeypatch.setattr(WeightBuffer, "filled", refused)
    trained, sampler = (
        split(tmp_path, lora),
        meta_policy(tmp_path, lora, adapter=None, seed=3, dtype=torch.float32, trust_remote_code=False),
    )
    units = {}
    for name in trained.units:
        with unit(trained, name) as tensors:
            units[name] = sum(tensor.nbytes for tensor in tensors.values())
    backend = FSDP2Backend(trained, sampler.policy, OPTIMIZER, compute_dtype=torch.float32)
    backend.choose_layout("sdpa")
    assert (backend.policy.stream, backend.sampler.stream) == ("prefix", "prefix")
    for _ in backend.weights():
        pass
    if lora is not None:
        backend.model_writer(TextFiles(origin=tmp_path), None)(tmp_path / "adapter")
    two = units[""] + 2 * max(num_bytes for name, num_bytes in units.items() if name)
    assert 0 < most[0] <= two < sum(units.values())
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in backend.sampler.parameters())
    monkeypatch.undo()
    with backend.rollout_view() as whole:
        assert sum(parameter.nbytes for parameter in whole.parameters()) == sum(units.values())
