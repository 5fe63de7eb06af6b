"""What is wrong with how the weights of the model are to be packed (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from covey.config.objects import is_live
from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.types import Fix, Problem

_BITSANDBYTES: dict[str, Any] = {"quant_bits": "4", "quant_method": "bnb"}
_CALIBRATED = ("gptq", "awq", "fp8")
_WHOLE = Fix(text="leave the weights as they are: leave out --quant_bits and --quant_method")


def quantization_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against packing the weights as the options say."""
    if config.quant_method is None and config.quant_bits is None:
        return []
    return [*_method(config), *_dtype(config), *_of_model(config, facts), *_of_run(config, facts)]


def packed_model_fixes(facts: Facts) -> tuple[Fix, ...]:
    """Return what trains a model whose weights bitsandbytes has packed; nothing for any other."""
    if facts.stored_packing is None:
        return ()
    edits = {"tuner_type": "lora", **facts.stored_packing}
    return (Fix(text="train an adapter on the packed weights (QLoRA)", edits=edits),)


def _method(config: Config) -> Iterator[Problem]:
    if config.quant_method == "bnb" and config.quant_bits is None:
        yield problem(
            "E386",
            "quant_bits",
            "quant_method is bnb, and quant_bits is not set.",
            "",
            Fix(text="4 bits, as in QLoRA", edits={"quant_bits": "4"}),
            _WHOLE,
        )
    if config.quant_method in (None, "bnb"):
        return
    cause = "A command of ms-swift, which packs weights by other packages too."
    if config.quant_method in _CALIBRATED:
        cause = "In ms-swift it names how `swift export` quantizes, or how a model is stored."
    yield problem(
        "E386",
        "quant_method",
        f"quant_method is {config.quant_method}, and covey packs weights by bitsandbytes alone (bnb).",
        cause,
        Fix(text="bitsandbytes, on the model as it is before it is quantized", edits=_BITSANDBYTES),
        _WHOLE,
    )


def _dtype(config: Config) -> Iterator[Problem]:
    if config.bnb_4bit_compute_dtype == "float16" and config.quant_bits == "4":
        yield problem(
            "E319",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_compute_dtype is float16, which this version does not train in.",
            "A command for GPUs older than bfloat16; float16 gradients vanish without loss scaling.",
            Fix(text="what torch_dtype says", edits={"bnb_4bit_compute_dtype": "auto"}),
        )


def _of_model(config: Config, facts: Facts) -> Iterator[Problem]:
    """A model of a program, or one that is stored packed in another way."""
    if is_live(config.model):
        seen = "quant_bits is set, and model is an object of the program, whose weights stay as they are."
        where = Fix(text="give the directory or id of the model, not the object: model='DIR_OR_ID'")
        yield problem("E386", "quant_bits", seen, "", where, _WHOLE)
    if facts.stored_packing is None or quantization_of(config) is None:
        return
    others = {n: v for n, v in facts.stored_packing.items() if getattr(config, n) != v}
    if others:
        shown = ", ".join(f"{n} {_shown(getattr(config, n))}" for n in others)
        held = ", ".join(f"{n} {_shown(v)}" for n, v in others.items())
        yield problem(
            "E386",
            next(iter(others)),
            f"The weights of {config.model} are stored packed with {held}, and the options say {shown}.",
            "",
            Fix(text="as they are stored", edits=others),
        )


def _of_run(config: Config, facts: Facts) -> Iterator[Problem]:
    """What is to be trained, and on how many devices a model lies."""
    if quantization_of(config) is None:
        return
    if config.tuner_type != "lora":
        yield problem(
            "E387",
            "quant_bits",
            f"quant_bits is {config.quant_bits}, and tuner_type is {config.tuner_type}.",
            "",
            Fix(text="train an adapter beside the packed weights (QLoRA)", edits={"tuner_type": "lora"}),
            _WHOLE,
        )
    layout = facts.layout
    if layout.fsdp or layout.zero_stage or config.deepspeed is not None:
        name = "fsdp" if layout.fsdp else "deepspeed"
        what = "FSDP" if layout.fsdp else f"DeepSpeed (ZeRO-{layout.zero_stage})"
        yield problem(
            "E387",
            name,
            f"quant_bits is {config.quant_bits}, and {what} splits the model over the processes.",
            "Packed weights need so little memory that each process holds all of them.",
            Fix(text=f"keep the whole packed model in each process: leave out --{name}"),
            Fix(text="split a model that is not quantized: leave out --quant_bits"),
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
