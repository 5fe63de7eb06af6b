"""LoRA adapters, by peft: put on a policy, switched off, merged for rollouts, saved and loaded.

peft replaces layers inside the model, so `Policy.model` stays the model of transformers and everything that
calls it goes through the adapter. The base is frozen; the adapter's matrices are float32 whatever the base
computes in. This is the one module that imports peft.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covey.config.adapters import ADAPTER_WEIGHTS
from covey.config.quantization import Quantization, write_quantization
from covey.errors import CheckpointError, CoveyError
from covey.models.adapter_shapes import (
    ADAPTER,
    ALL_LINEAR,
    PEFT,
    LoraFacts,
    LoraSettings,
    ModelShapes,
    adapter_settings,
    facts_of,
    is_of_adapter,
    plain_name,
)
from covey.models.policy import Policy
from covey.models.quantized import as_stored, cast_unpacked, compute_in, is_packed, unpacked, whole_shape
from covey.texts import joined, tr


class AdapterError(CoveyError, ValueError):
    """An adapter that cannot be put on this model, with the names at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of a policy: peft's handle, the layers it changes and the modules it trains whole.

    The handle contains the model; a policy keeps it here, in no module, so that no parameter has two names.
    `quantization` is how the base was packed, where it was.
    """

    settings: LoraSettings
    facts: LoraFacts
    handle: Any
    layers: tuple[Any, ...]
    copies: tuple[Any, ...]
    quantization: Quantization | None = None


Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterAlone:
    """An adapter of `rank` that an engine can apply itself: matrices beside linear layers and nothing else.

    `base` gives the weights of the base under transformers' names, `matrices` those of the adapter under
    peft's, in a dtype (None: as the base computes), whole and one at a time; both are collective. The update
    of a layer is B @ A: its scale is in B.
    """

    rank: int
    base: Callable[[torch.dtype | None], Named]
    matrices: Callable[[torch.dtype | None], Named]


def add_adapter(
    policy: Policy,
    settings: LoraSettings,
    *,
    seed: int,
    compute_dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
) -> None:
    """Put a new adapter on a policy whose weights are float32, or packed by a `quantization`; the base is
    frozen, and cast where it is not packed.

    The same seed gives the same adapter on every rank and device, and a new one changes no output bit. Raises
    AdapterError for names that match nothing, or something that an adapter would not reach.
    """
    from peft import LoraConfig, get_peft_model

    assert policy.adapter is None, "the policy has an adapter"
    model: Any = policy.model
    facts = facts_of(_shapes(model), settings)
    _refuse(facts)
    by_name = ALL_LINEAR not in settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules if by_name else facts.targets),
        modules_to_save=list(facts.saved) or None,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft asks transformers by a name that is on its way out.
        warnings.simplefilter("ignore", FutureWarning)
        # The matrices are drawn on the CPU; torch.manual_seed would move the GPUs' generators too.
        torch.default_generator.manual_seed(seed)
        try:
            handle: Any = get_peft_model(model, config)
        except ValueError as error:
            words = tr("peft cannot add this adapter to the model: {error}", error=error)
            raise AdapterError(words) from error
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    odd = sorted(n for n, m in layers.items() if not _is_linear(m))
    if odd or sorted(layers) != list(facts.targets):
        others = sorted(set(layers) ^ set(facts.targets)) or odd
        words = tr("peft adapts other modules than the given ones: {others}", others=joined(", ", others[:5]))
        raise AdapterError(words)
    cast_unpacked((p for p in model.parameters() if not p.requires_grad), compute_dtype)
    if quantization is not None:
        compute_in(model, quantization, compute_dtype)
    policy.adapter = Adapter(
        settings=settings,
        facts=facts,
        handle=handle,
        layers=tuple(layers.values()),
        copies=tuple(m for m in model.modules() if hasattr(m, "modules_to_save")),
        quantization=quantization,
    )
    reset_magnitudes(policy.adapter.layers if settings.use_dora else ())


def _is_linear(layer: Any) -> bool:
    """Whether a layer of peft's is of a linear one, packed or not."""
    from peft.tuners.lora import Linear

    return isinstance(layer, Linear) or is_packed(layer.get_base_layer().weight)


@contextmanager
def adapter_off(policy: Policy) -> Iterator[Policy]:
    """The policy without its adapter, which is the base model by its modules; for passes without gradient."""
    assert policy.adapter is not None
    parts = (*policy.adapter.layers, *policy.adapter.copies)
    # peft would answer by subtracting the update, and the base would drift.
    assert not any(layer.merged for layer in policy.adapter.layers), "the adapter is merged"
    for part in parts:
        part.enable_adapters(False)
    try:
        yield policy
    finally:
        for part in parts:
            part.enable_adapters(True)


@contextmanager
def merged(policy: Policy) -> Iterator[Policy]:
    """The policy with its update added to the weights, so that a token costs what the base costs.

    Each float32 weight is written over with the sum and written back, so the base keeps its very bits at its
    place, which recordings of a GPU read; what is held aside takes the adapted weights' size once more.
    Weights of a lower dtype, and packed ones, stay unmerged: the sum would be rounded, and the sampler would
    not be the policy.
    """
    layers = policy.adapter.layers if policy.adapter is not None else ()
    held: list[tuple[Any, Tensor]] = []
    try:
        for layer in layers:
            base = layer.get_base_layer()
            if base.weight.dtype == torch.float32 and not is_packed(base.weight):
                held.append((layer, base.weight.data.clone()))
                base.weight.data.copy_(_sum(layer))
                layer.merged_adapters.append(ADAPTER)
        yield policy
    finally:
        for layer, weight in held:
            layer.get_base_layer().weight.data.copy_(weight)
            layer.merged_adapters.clear()


def adapter_parameters(policy: Policy) -> frozenset[str]:
    """The names of the adapter's own parameters, float32 always; whole copies are not among them."""
    if policy.adapter is None:
        return frozenset()
    return frozenset(n for n, _ in policy.named_parameters() if ".lora_" in n)


def plain_weights(policy: Policy, among: Collection[str] | None = None) -> Named:
    """Weights under transformers' names, the update added where there is an adapter, one at a time; in
    float32 where they are packed. Where `among` is given, those of the policy's tensors of these names."""
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name or (policy.adapter is not None and ".original_module." in name):
            continue
        if among is not None and f"model.{name}" not in among:
            continue
        layer: Any = None
        if name.endswith(".base_layer.weight"):
            layer = policy.model.get_submodule(name.removesuffix(".base_layer.weight"))
        if layer is not None and not layer.merged:
            weight = _sum(layer)
        else:
            weight = unpacked(parameter) if is_packed(parameter) else parameter.detach()
        if is_packed(parameter):
            weight = as_stored(policy.model.get_submodule(name.removesuffix(".weight")), weight)
        yield plain_name(name), weight


def adapter_alone(policy: Policy) -> AdapterAlone | None:
    """The adapter of a policy with whole weights, for an engine; None where `applied_rank` is 0."""
    adapter, rank = policy.adapter, applied_rank(policy)
    if adapter is None or not rank:
        return None
    computed: torch.dtype = adapter.layers[0].get_base_layer().weight.dtype
    scaling = adapter.settings.scaling

    def base(dtype: torch.dtype | None) -> Named:
        return in_dtype(base_weights(policy.model.named_parameters()), dtype)

    def matrices(dtype: torch.dtype | None) -> Named:
        return adapter_weights(policy.model.named_parameters(), scaling, dtype or computed)

    return AdapterAlone(rank=rank, base=base, matrices=matrices)


def applied_rank(policy: Policy) -> int:
    """The rank of an adapter that is matrices beside linear layers of the language model and nothing else; 0
    where there is none, with DoRA, whole copies, or a packed base."""
    adapter = policy.adapter
    if adapter is None or adapter.settings.use_dora or adapter.copies or adapter.quantization is not None:
        return 0
    is_of_text = all(policy.part_of(name) == "llm" for name in adapter.facts.targets)
    return adapter.settings.rank if is_of_text else 0


def base_weights(named: Iterable[tuple[str, Tensor]]) -> Named:
    """Of tensors by the names that they have in an adapted model, those of the base under transformers'
    names, without the update."""
    return ((plain_name(name), tensor.detach()) for name, tensor in named if not is_of_adapter(name))


def adapter_weights(named: Iterable[tuple[str, Tensor]], scaling: float, dtype: torch.dtype) -> Named:
    """Of tensors by the names that they have in an adapted model, the adapter's matrices under peft's names,
    in `dtype`, B multiplied by `scaling`."""
    for name, tensor in named:
        if is_of_adapter(name):
            own = tensor.detach() * scaling if ".lora_B." in name else tensor.detach()
            yield PEFT + name.replace(f".{ADAPTER}.", "."), own.to(dtype)


def in_dtype(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Named:
    """Tensors in `dtype`; None: as they are."""
    return ((name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in named)


def tied_names(policy: Policy) -> dict[str, str]:
    """The names that `plain_weights` leaves out because their tensor has one already:
    `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in policy.model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            found[plain_name(name)] = first[id(parameter)]
        first.setdefault(id(parameter), plain_name(name))
    return found


def save_adapter(adapter: Adapter, tensors: Mapping[str, Tensor], target: Path, *, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors as peft reads them; `base` is the model's path
    or name."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    save_file(plain, str(target / ADAPTER_WEIGHTS), metadata={"format": "pt"})
    config = copy.copy(adapter.handle.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    # peft holds a set here, whose order in the file would change from run to run.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(target))
    if adapter.quantization is not None:
        write_quantization(adapter.quantization, target)


def load_adapter(policy: Policy, directory: Path) -> None:
    """Restore what `save_adapter` wrote, bit for bit, onto an adapter of the same settings."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert policy.adapter is not None
    settings, _ = adapter_settings(directory)
    if settings.scaling != policy.adapter.settings.scaling:
        raise CheckpointError(
            tr(
                "the adapter in {directory} has the scaling {scaling:g}, but this one has {own:g}",
                directory=directory,
                scaling=settings.scaling,
                own=policy.adapter.settings.scaling,
            )
        )
    try:
        tensors = load_file(str(directory / ADAPTER_WEIGHTS))
    except (OSError, SafetensorError) as error:
        words = tr("{file} cannot be read: {error}", file=directory / ADAPTER_WEIGHTS, error=error)
        raise CheckpointError(words) from error
    own = {n: t.shape for n, t in adapter_tensors(policy.adapter).items()}
    held = {n: t.shape for n, t in tensors.items()}
    if own != held:
        odd = sorted(n for n in own.keys() | held.keys() if own.get(n) != held.get(n))
        words = tr(
            "{directory} contains another adapter: {count} tensors differ, the first is {first}",
            directory=directory,
            count=len(odd),
            first=odd[0],
        )
        raise CheckpointError(words)
    set_peft_model_state_dict(policy.adapter.handle, tensors)


def merge_into_base(policy: Policy) -> nn.Module:
    """The plain model of transformers with the update added for good; the policy is used up."""
    assert policy.adapter is not None and policy.adapter.quantization is None, (
        "packed weights cannot hold an update"
    )
    model = policy.adapter.handle.merge_and_unload(safe_merge=True)
    policy.adapter = None
    return model  # type: ignore[no-any-return]


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """What an adapter is saved as, by peft's names; not copied."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(adapter.handle, save_embedding_layers=False)  # type: ignore[no-any-return]


def _shapes(model: Any) -> ModelShapes:
    tensors = {n: whole_shape(p) for n, p in model.named_parameters(remove_duplicate=False)}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    vocab_size = model.config.get_text_config().vocab_size
    return ModelShapes(tensors=tensors, vocab_size=vocab_size, tied=tied, family=model.config.model_type)


def _refuse(facts: LoraFacts) -> None:
    faults = [f"{name!r}: {why}" for name, why in facts.refused.items()]
    for name, near in facts.unmatched.items():
        hint = tr("; similar names: {near}", near=joined(", ", near)) if near else ""
        faults.append(tr("{name!r} matches no module{hint}", name=name, hint=hint))
    if not faults and not facts.targets:
        faults.append(tr("no module remains that could get an adapter"))
    if faults:
        raise AdapterError(joined("; ", faults))


@torch.no_grad()
def reset_magnitudes(layers: Iterable[Any]) -> None:
    """Set DoRA's magnitudes of these layers to the norms of their weights as they compute, so that a new
    adapter changes nothing."""
    for layer in layers:
        layer.lora_magnitude_vector[ADAPTER].update_layer(
            base_layer=layer.get_base_layer(),
            lora_A=layer.lora_A[ADAPTER].weight,
            lora_B=layer.lora_B[ADAPTER].weight,
            scaling=layer.scaling[ADAPTER],
        )


@torch.no_grad()
def _sum(layer: Any) -> Tensor:
    """A layer's weight with its update, as peft merges it; the layer is left as it was."""
    base = layer.get_base_layer()
    if is_packed(base.weight):
        whole, dora = unpacked(base.weight), layer.lora_variant.get(ADAPTER)
        if dora is None:
            return whole + layer.get_delta_weight(ADAPTER)  # type: ignore[no-any-return]
        return dora.merge_safe(layer, ADAPTER, whole)  # type: ignore[no-any-return]
    weight = base.weight.data
    try:
        # The safe kind works on a copy of the weight and puts the copy in its place.
        layer.merge(safe_merge=True)
        return base.weight.data  # type: ignore[no-any-return]
    finally:
        base.weight.data = weight
        layer.merged_adapters.clear()
