"""What vLLM holds under transformers' names, its checksums over shards, and the arguments that it gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covey.checksums import checksum
from covey.rollout.vllm.library import is_greedy, seed_of
from covey.rollout.vllm.names import Part, adapter_parts_of, parts_of, whole, whole_adapter
from covey.rollout.vllm.settings import OWNED, VllmSettings, arguments_of
from covey.types import TurnId

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
VOCAB, HIDDEN, HEAD, HEADS, KV = 10, 8, 4, 4, 2


def weights() -> dict[str, Tensor]:
    """A layer of a small model under transformers' names."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model.embed_tokens.weight": made(VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": made(HEADS * HEAD, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": made(KV * HEAD, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": made(KV * HEAD, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": made(HEADS * HEAD),
        "model.layers.0.self_attn.k_proj.bias": made(KV * HEAD),
        "model.layers.0.self_attn.v_proj.bias": made(KV * HEAD),
        "model.layers.0.self_attn.o_proj.weight": made(HIDDEN, HEADS * HEAD),
        "model.layers.0.mlp.gate_proj.weight": made(12, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": made(12, HIDDEN),
        "model.norm.weight": made(HIDDEN),
    }


def node(**children: object) -> nn.Module:
    """A module with these parts: tensors become parameters."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, nn.Parameter(child) if isinstance(child, Tensor) else child)
    return module


def as_vllm(sent: dict[str, Tensor], rank: int = 0, world: int = 1, *, wrapped: bool = False) -> nn.Module:
    """The same weights as a rank of vLLM lays them out: fused rows, its part of each, rows of padding behind
    the vocabulary, key heads on several ranks where there are fewer of them, and a tied head."""
    replicas = max(1, world // KV)

    def part(name: str, dim: int = 0, copies: int = 1) -> Tensor:
        return sent[name].chunk(world // copies, dim)[rank // copies].clone()

    at = "model.layers.0."
    kinds = {}
    for kind in ("weight", "bias"):
        rows = [part(f"{at}self_attn.{n}.{kind}", copies=c) for n, c in (("q_proj", 1), ("k_proj", replicas))]
        rows.append(part(f"{at}self_attn.v_proj.{kind}", copies=replicas))
        kinds[kind] = torch.cat(rows)
    sizes = [len(r) for r in rows]
    qkv = node(**kinds, output_partition_sizes=sizes)
    gate, up = part(f"{at}mlp.gate_proj.weight"), part(f"{at}mlp.up_proj.weight")
    merged = node(weight=torch.cat([gate, up]), output_partition_sizes=[len(gate), len(up)])
    rows_of_vocab = part("model.embed_tokens.weight")
    embed = node(
        weight=torch.cat([rows_of_vocab, torch.zeros(3, HIDDEN)]),
        shard_indices=SimpleNamespace(num_org_elements=len(rows_of_vocab)),
    )
    attention = node(
        qkv_proj=node(base_layer=qkv) if wrapped else qkv,
        o_proj=node(weight=part(f"{at}self_attn.o_proj.weight", dim=1)),
    )
    layer = node(self_attn=attention, mlp=node(gate_up_proj=merged))
    inner = node(
        embed_tokens=embed, layers=nn.ModuleList([layer]), norm=node(weight=sent["model.norm.weight"])
    )
    return node(model=inner, lm_head=embed)


def sizes_of(sent: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in sent.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("wrapped", [False, True])
def test_shards_add_up_to_what_was_sent(world: int, wrapped: bool) -> None:
    sent = weights()
    if world == 4:
        sent["model.embed_tokens.weight"] = torch.randn(12, HIDDEN)
    ranks = [parts_of(as_vllm(sent, rank, world, wrapped=wrapped), FUSED) for rank in range(world)]
    held = whole(ranks, sizes_of(sent))
    assert held.fingerprints == {name: checksum(tensor) for name, tensor in sent.items()}
    assert held.unread == ()


@pytest.mark.parametrize("name", weights())
def test_a_bit_that_differs_shows_in_its_tensor_alone(name: str) -> None:
    sent = weights()
    held = {n: t.clone() for n, t in sent.items()}
    held[name].view(-1)[-1] *= 2
    found = whole([parts_of(as_vllm(held, r, 2), FUSED) for r in range(2)], sizes_of(sent)).fingerprints
    assert [n for n in sent if found[n] != checksum(sent[n])] == [name]


def test_copies_that_differ_are_no_tensor_that_could_be_sent() -> None:
    """A norm is whole on each rank: one that was left out of the publish is found, whichever it is."""
    sent = weights()
    for stale in range(2):
        ranks = [parts_of(as_vllm(sent, r, 2), FUSED) for r in range(2)]
        old = ranks[stale]["model.norm.weight"]
        ranks[stale]["model.norm.weight"] = Part(old.checksum + 1, old.numel)
        found = whole(ranks, sizes_of(sent)).fingerprints["model.norm.weight"]
        assert found != checksum(sent["model.norm.weight"])


def test_what_is_packed_is_named_and_not_compared() -> None:
    sent = weights()
    model = as_vllm(sent)
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, operator, index]
    attention.qkv_proj.weight = nn.Parameter(torch.empty(0))
    held = whole([parts_of(model, FUSED)], sizes_of(sent))
    packed = tuple(f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv")
    assert held.unread == packed
    assert held.fingerprints == {n: checksum(t) for n, t in sent.items() if n not in packed}


def test_a_bias_that_was_packed_too_is_not_compared() -> None:
    """Where a CPU multiplies in bfloat16 vLLM's packed layers have biases in float32."""
    sent = {name: tensor.bfloat16() for name, tensor in weights().items()}
    model = as_vllm(sent)
    qkv = model.model.layers[0].self_attn.qkv_proj  # type: ignore[union-attr, operator, index]
    qkv.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    qkv.bias.data = qkv.bias.data.float()
    held = whole([parts_of(model, FUSED)], sizes_of(sent))
    assert set(held.unread) == {n for n in sent if "q_proj" in n or "k_proj" in n or "v_proj" in n}


def test_a_tensor_that_was_not_sent_is_in_what_is_held() -> None:
    sent = weights()
    given = {n: s for n, s in sizes_of(sent).items() if n != "model.norm.weight"}
    held = whole([parts_of(as_vllm(sent), FUSED)], given)
    assert held.fingerprints.keys() - given.keys() == {"model.norm.weight"}


def test_tensors_under_other_names_cannot_be_compared() -> None:
    sent = {f"language_{n}" if n == "model.norm.weight" else n: t for n, t in weights().items()}
    held = whole([parts_of(as_vllm(weights()), FUSED)], sizes_of(sent))
    assert held.unread == ("language_model.norm.weight",)
    assert held.fingerprints.keys() == sent.keys() - {"language_model.norm.weight"}


RANK = 3


def matrices() -> dict[str, Tensor]:
    """Those of an adapter on three of the layer's modules, under peft's names."""
    generator, found = torch.Generator().manual_seed(1), {}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"):
        rows, columns = weights()[f"model.layers.0.{name}.weight"].shape
        for kind, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            at = f"base_model.model.model.layers.0.{name}.lora_{kind}.weight"
            found[at] = torch.randn(*shape, generator=generator)
    return found


def adapted(sent: dict[str, Tensor], rank: int = 0, world: int = 1) -> dict[str, Any]:
    """The same matrices as a rank of vLLM lays them out: in the second slot of two, with room for a rank of 4
    and zeros in it; B is divided where outputs are, A where inputs are, and a head has one of each."""

    def stack(module: str, kind: str, dim: int | None, shape: tuple[int, int]) -> Tensor:
        own = sent.get(f"base_model.model.model.layers.0.{module}.lora_{kind}.weight")
        room = torch.zeros(2, 1, *((4, shape[1]) if kind == "A" else (shape[0], 4)))
        if own is not None:
            part = own if dim is None else own.chunk(world, dim)[rank]
            room[1, 0, : part.shape[0], : part.shape[1]] = part
        return room

    def layer(*names: str, is_row: bool = False) -> SimpleNamespace:
        stacks: dict[str, tuple[Tensor, ...]] = {}
        for kind, dim in (("A", 1 if is_row else None), ("B", None if is_row else 0)):
            shapes = [tuple(weights()[f"model.layers.0.{name}.weight"].shape) for name in names]
            cut = [(s[0], s[1] // world) if is_row else (s[0] // world, s[1]) for s in shapes]
            parts = zip(names, cut, strict=True)
            stacks[kind] = tuple(stack(name, kind, dim, shape) for name, shape in parts)
        return SimpleNamespace(lora_a_stacked=stacks["A"], lora_b_stacked=stacks["B"])

    at = "model.layers.0."
    return {
        f"{at}self_attn.qkv_proj": layer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        f"{at}self_attn.o_proj": layer("self_attn.o_proj", is_row=True),
        f"{at}mlp.gate_up_proj": layer("mlp.gate_proj", "mlp.up_proj"),
        "lm_head": SimpleNamespace(
            lora_a_stacked=torch.zeros(2, 1, 4, HIDDEN), lora_b_stacked=torch.zeros(2, 1, VOCAB, 4)
        ),
        "model.embed_tokens": SimpleNamespace(
            lora_a_stacked=torch.zeros(2, VOCAB, 4), lora_b_stacked=torch.zeros(2, 1, HIDDEN, 4)
        ),
        "other": SimpleNamespace(),
    }


PATHS = {
    "model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"],
    "model.layers.0.mlp.gate_up_proj": [f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")],
}


def held_of(layers: list[dict[str, Any]], sent: dict[str, Tensor], slot: int = 1) -> dict[str, int]:
    parts = [adapter_parts_of(own, PATHS, slot, RANK) for own in layers]
    held = whole_adapter(parts, sizes_of(sent))
    assert held.unread == ()
    return held.fingerprints


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_adapter_on_ranks(world: int) -> None:
    sent = matrices()
    layers = [adapted(sent, rank, world) for rank in range(world)]
    assert held_of(layers, sent) == {name: checksum(tensor) for name, tensor in sent.items()}
    # A new one has a B of zeros, which is there all the same.
    fresh = {n: t * (".lora_A." in n) for n, t in sent.items()}
    layers = [adapted(fresh, rank, world) for rank in range(world)]
    assert held_of(layers, fresh) == {name: checksum(tensor) for name, tensor in fresh.items()}


@pytest.mark.parametrize("name", matrices())
def test_a_number_of_an_adapter_that_differs(name: str) -> None:
    sent = matrices()
    other = {n: t.clone() for n, t in sent.items()}
    other[name].view(-1)[-1] *= 2
    found = held_of([adapted(other, rank, 2) for rank in range(2)], sent)
    assert [n for n in sent if found[n] != checksum(sent[n])] == [name]


def test_what_an_adapter_has_that_was_not_sent_and_what_it_lacks() -> None:
    sent = matrices()
    layers = adapted(sent)
    # Zeros of other modules, and of another slot, are nothing.
    assert held_of([layers], sent).keys() == sent.keys()
    assert set(held_of([layers], sent, slot=0).values()) == {0}
    k_proj = layers["model.layers.0.self_attn.qkv_proj"].lora_b_stacked[1]
    k_proj[1, 0, 0, 0] = 1.0
    assert held_of([layers], sent).keys() - sent.keys() == {
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    }
    # Beside the adapter there is nothing to compute with.
    layers = adapted(sent)
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    layers["model.layers.0.self_attn.o_proj"].lora_a_stacked[0][1, 0, RANK, 0] = 1.0
    assert held_of([layers], sent)[name] != checksum(sent[name])
    assert whole_adapter([{}], sizes_of(sent)).fingerprints == {}


def settings(**changes: object) -> VllmSettings:
    given = {"model": "m", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "on_gpu": True}
    return VllmSettings(**{**given, **changes})  # type: ignore[arg-type]


def test_arguments() -> None:
    found = arguments_of(settings(memory_share=0.4, sleep_level=2, extra={"block_size": 32}))
    assert found["logprobs_mode"] == "processed_logprobs" and found["skip_tokenizer_init"] is True
    assert found["gpu_memory_utilization"] == 0.4 and found["enable_sleep_mode"] is True
    assert found["load_format"] == "dummy" and found["block_size"] == 32
    assert "kv_cache_memory_bytes" not in found and "enable_lora" not in found
    on_cpu = arguments_of(settings(on_gpu=False, cache_bytes=5, sleep_level=2, has_weights=True, lora_rank=8))
    assert on_cpu["kv_cache_memory_bytes"] == 5 and on_cpu["load_format"] == "auto"
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & on_cpu.keys()
    assert on_cpu["enable_chunked_prefill"] is False and "enable_chunked_prefill" not in found
    assert on_cpu["enable_lora"] is True and on_cpu["max_lora_rank"] == 8
    assert arguments_of(settings(lora_rank=9))["max_lora_rank"] == 16
    with pytest.raises(ValueError, match="rank 512"):
        settings(lora_rank=513)
    assert (
        arguments_of(settings(by_torchrun=True, group_name="g"))["distributed_executor_backend"]
        == "external_launcher"
    )


def test_every_argument_of_coveys_is_refused_as_an_extra_one() -> None:
    cases = [settings(by_torchrun=True, group_name="g", lora_rank=8), settings(on_gpu=False)]
    cases.append(settings(media_limits={"image": 1}, image_pixels=(1, 2)))
    given = {name for case in cases for name in arguments_of(case)}
    assert given - OWNED == {"disable_log_stats", "enable_chunked_prefill"}
    with pytest.raises(ValueError, match="logprobs_mode, seed"):
        settings(extra={"seed": 1, "logprobs_mode": "raw_logits"})


def test_seeds_differ_in_each_part_of_the_key() -> None:
    key = {"seed": 1, "split": "train", "rollout": 2, "attempt": 0, "prompt_id": 3, "sibling": 4}
    changes = [{}, *({n: 9} for n in key if n != "split"), {"split": "eval"}]
    seeds = [seed_of(TurnId(**{**key, **change})) for change in changes]
    assert len(set(seeds)) == len(seeds) == 7
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds[0] == seed_of(TurnId(**key))


def test_temperatures_that_vllm_would_replace() -> None:
    assert is_greedy(1e-6) and not is_greedy(0.01) and not is_greedy(1.0)
    with pytest.raises(ValueError, match=r"0\.005"):
        is_greedy(0.005)
