"""Facts about the adapter that a run starts from, and about that of its reference; torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.checkpoint.manifest import hash_file
from covey.config.adapters import (
    ADAPTER_WEIGHTS,
    AdapterFileError,
    adapter_path,
    quantized_base,
    read_adapter,
    same_base,
    stored,
    weights_fault,
)
from covey.config.objects import is_live
from covey.config.quantization import adapter_quantization, quantization_of
from covey.config.start import adapter_directory, reference_adapter
from covey.models.adapter_shapes import ALL_LINEAR, ModelShapes, adapter_fault, facts_of, settings_of
from covey.options.schema import Config
from covey.plan.facts import AdapterFacts, Facts, ModelFacts
from covey.plan.memory_training import has_kl
from covey.texts import tr

_SHAPE = ("lora_rank", "lora_alpha", "use_rslora", "use_dora", "modules_to_save")


def with_adapter(facts: Facts, config: Config, shapes: ModelShapes) -> Facts:
    """The facts with those of the adapter, where a run starts from one that can be read."""
    directory = adapter_directory(config)
    if directory is None or config.tuner_type != "lora":
        return facts
    try:
        saved, tensors = read_adapter(directory), stored(directory)
    except AdapterFileError:
        return facts  # said where the options were read
    settings = settings_of(saved.options)
    everywhere = replace(settings, target_modules=(ALL_LINEAR,), frozen=config.frozen_parts)
    problem = adapter_fault(tensors, shapes, settings)
    found = AdapterFacts(
        problem=problem,
        other_base="" if _is_base(saved.base, config, facts.model) else saved.base,
        **_quantized(config, directory),
        is_on_all_linear=facts_of(shapes, settings).targets == facts_of(shapes, everywhere).targets,
    )
    reference = reference_adapter(config) if has_kl(config) else None
    if reference is not None and problem is None:
        fault = _reference_problem(config, reference, shapes) if reference != directory else None
        digest = hash_file(reference / ADAPTER_WEIGHTS) if fault is None else None
        found = replace(found, reference_problem=fault, digest=digest)
    return replace(facts, lora=replace(facts.lora, start=found))


def _quantized(config: Config, directory: Path) -> dict[str, Any]:
    """How the base of an adapter was quantized, where the run does not do the same."""
    own, said = quantization_of(config), adapter_quantization(directory)
    if said:
        if all(getattr(config, name) == value for name, value in said.items()):
            return {}
        return {
            "quantized": tr("bnb, {quant_bits} bits", quant_bits=said["quant_bits"]),
            "quantization": said,
        }
    method, bits = quantized_base(directory) or ("", "")
    if not method or (method == "bnb" and own is not None and str(own.bits) == bits):
        return {}
    return {
        "quantized": tr("{method}, {bits} bits", method=method, bits=bits),
        "quantization": {"quant_bits": bits} if bits in ("4", "8") else {},
    }


def _is_base(base: str, config: Config, model: ModelFacts) -> bool:
    """Whether the model may be the base that an adapter names; one without a name may be any."""
    if not base or is_live(base) or is_live(config.model) or same_base(base, config.model):
        return True
    return model.directory is not None and adapter_path(base).resolve() == Path(model.directory).resolve()


def _reference_problem(config: Config, directory: Path, shapes: ModelShapes) -> tuple[str, str] | None:
    """Why the reference cannot be the policy with the tensors of this directory in it."""
    try:
        saved = read_adapter(directory)
    except AdapterFileError as error:
        return ("E381" if error.kind == "other" else "E380"), str(error)
    unread = weights_fault(directory)
    if unread is not None:
        return "E380", str(unread)
    own = config.model_dump()
    for name in _SHAPE:
        if saved.options[name] != own[name]:
            return (
                "E384",
                tr(
                    "{directory} has {name} {options}, but the adapter that trains has {own}",
                    directory=directory,
                    name=name,
                    options=saved.options[name],
                    own=own[name],
                ),
            )
    fault = adapter_fault(stored(directory), shapes, settings_of(own))
    return (
        None
        if fault is None
        else (
            "E384",
            tr(
                "{directory} adapts other modules than the adapter that trains: {fault}",
                directory=directory,
                fault=fault,
            ),
        )
    )
