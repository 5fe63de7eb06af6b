"""The tensors that vLLM holds under transformers' names, cut out of fused ones, and checksums over shards.

vLLM keeps q_proj, k_proj and v_proj as rows of one qkv_proj, and gate_proj and up_proj as those of one
gate_up_proj; a model class says so in its `packed_modules_mapping`. Under tensor parallelism each rank holds
a part of a tensor, or all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from covey.checksums import MODULUS, checksum
from covey.models.adapter_shapes import PEFT

_WRAPPED = ".base_layer"
# Slots, 1, and the two sides of a matrix.
_STACK_DIM = 4


class Part(NamedTuple):
    """What a rank holds of a tensor: the sum of its bits, and how many numbers; none where vLLM keeps the
    tensor in a packed form that cannot be read."""

    checksum: int
    numel: int


Parts = Mapping[str, Sequence[int]]
"""By transformers' name a `Part`, as it comes from a worker: a list where it is another process."""


def parts_of(
    model: nn.Module, fused: Mapping[str, Sequence[str]], sent: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Part]:
    """Return what this rank's `model` holds; `fused` are the names that each fused module stands for.

    `sent` has the name under which a tensor was sent, where vLLM has it under another one.
    """
    # A module may be listed as itself.
    several = {leaf: names for leaf, names in fused.items() if len(names) > 1}
    return {
        sent.get(name, name): Part(checksum(tensor) if tensor.numel() else 0, tensor.numel())
        for name, tensor in _tensors(model, several)
    }


def _tensors(model: nn.Module, fused: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, tensor in module.named_parameters(recurse=False):
            # A tied head is the embedding, or a module of its own with the same parameter.
            if id(tensor) in seen and tensor.numel():
                continue
            seen.add(id(tensor))
            tensor = _as_sent(module, tensor)
            where, _, leaf = path.removesuffix(_WRAPPED).rpartition(".")
            before = f"{where}." if where else ""
            if leaf not in fused:
                yield f"{before}{leaf}.{kind}" if leaf else kind, _without_padding(module, tensor)
                continue
            names = [f"{before}{name}.{kind}" for name in fused[leaf]]
            if tensor.numel() == 0:
                yield from ((name, tensor) for name in names)
            else:
                sizes = list(module.output_partition_sizes)  # type: ignore[arg-type, call-overload]
                yield from zip(names, tensor.split(sizes, dim=0), strict=True)


def adapter_parts_of(
    layers: Mapping[str, Any],
    fused: Mapping[str, Sequence[str]],
    slot: int,
    rank: int,
    sent: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Part]:
    """Return what this rank holds of the adapter of `rank` in a slot, under peft's names; of a layer that is
    not adapted these are zeros. `fused` are the paths that the path of a fused layer stands for. `sent` has
    the path in the learner's model, where vLLM has a layer at another one.

    vLLM keeps room for matrices of its highest rank; what lies in it beside the adapter is in the sum too.
    """
    found = {}
    for path, layer in layers.items():
        stacks = [getattr(layer, f"lora_{kind}_stacked", ()) for kind in "ab"]
        names = fused.get(path, [path])
        for kind, stack in zip("AB", stacks, strict=True):
            # That of a head is one tensor. Other layers than linear ones have other shapes.
            own = [stack] if isinstance(stack, Tensor) else stack
            if len(own) != len(names) or any(tensor.dim() != _STACK_DIM for tensor in own):
                continue
            for name, tensor in zip(names, own, strict=True):
                held = tensor[slot, 0]
                used = held[:rank] if kind == "A" else held[:, :rank]
                own_name = f"{PEFT}{sent.get(name, name)}.lora_{kind}.weight"
                found[own_name] = Part(checksum(held), used.numel())
    return found


def layer_of(name: str) -> str:
    """Return the path of the layer that a matrix of an adapter is of."""
    return name.removeprefix(PEFT).rpartition(".lora_")[0]


def _as_sent(module: nn.Module, tensor: Tensor) -> Tensor:
    """Nothing in the place of a bias that was packed with its weight into another dtype."""
    weight = getattr(module, "weight", None)
    is_packed = weight is not None and weight.numel() == 0 and tensor.dtype != weight.dtype
    return tensor.new_empty(0) if is_packed else tensor


def _without_padding(module: nn.Module, tensor: Tensor) -> Tensor:
    """The rows of an embedding that are tokens of the model: vLLM rounds their number up."""
    shard = getattr(module, "shard_indices", None)
    return tensor if shard is None or tensor.numel() == 0 else tensor[: shard.num_org_elements]


class Held(NamedTuple):
    """Checksums of whole tensors, and the names of those that cannot be read back."""

    fingerprints: dict[str, int]
    unread: tuple[str, ...]


def whole(ranks: Sequence[Parts], sent: Mapping[str, int]) -> Held:
    """Return the checksums of whole tensors from what each rank holds of them.

    `sent` has how many numbers each published tensor has. Together the ranks hold a whole number of copies
    of a tensor, and ranks side by side hold the same part, so every n-th rank of n copies gives one whole
    tensor. Copies that differ make a checksum that no tensor has. What is held under another name than it was
    sent under, as tensors of some models are, cannot be compared.
    """
    fingerprints: dict[str, int] = {}
    unread = []
    for name in ranks[0]:
        parts = [Part(*rank[name]) for rank in ranks]
        held, expected = sum(part.numel for part in parts), sent.get(name)
        if not all(part.numel for part in parts):
            unread.append(name)
        elif expected is None or held % expected:
            fingerprints[name] = sum(part.checksum for part in parts) % MODULUS
        else:
            fingerprints[name] = _sum_of(parts, held // expected)
    strange, unmatched = fingerprints.keys() - sent.keys(), sent.keys() - ranks[0].keys()
    if strange and unmatched:
        fingerprints = {n: c for n, c in fingerprints.items() if n in sent}
        unread += sorted(unmatched)
    return Held(fingerprints, tuple(unread))


def whole_adapter(ranks: Sequence[Parts], sent: Mapping[str, int]) -> Held:
    """Return `whole` of the matrices that were sent, and of others that are not zero."""
    names = [n for n in ranks[0] if n in sent or any(rank[n][0] for rank in ranks)]
    return whole([{name: rank[name] for name in names} for rank in ranks], sent)


def _sum_of(parts: Sequence[Part], copies: int) -> int:
    groups = [parts[i : i + copies] for i in range(0, len(parts), copies)]
    if any(part != group[0] for group in groups for part in group):
        return MODULUS
    return sum(group[0].checksum for group in groups) % MODULUS
