"""Finds faults in how the weights of the model are to be quantized (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from covey.config.objects import is_live
from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.facts import Facts, ModelFacts
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

_BITSANDBYTES: dict[str, Any] = {"quant_bits": "4", "quant_method": "bnb"}
_CALIBRATED = ("gptq", "awq", "fp8")
_PLAIN = Fix(text=tr("do not quantize: leave out --quant_bits and --quant_method"))


def quantization_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against quantizing the weights as the options say."""
    if config.quant_method is None and config.quant_bits is None:
        return []
    return [*_method(config), *_dtype(config), *_of_model(config, facts.model), *_of_run(config, facts)]


def quantized_model_fixes(model: ModelFacts) -> tuple[Fix, ...]:
    """Return what trains a model that bitsandbytes has quantized; nothing for any other."""
    if model.stored_quantization is None:
        return ()
    edits = {"tuner_type": "lora", **model.stored_quantization}
    return (Fix(text=tr("train an adapter on the quantized weights (QLoRA)"), edits=edits),)


def _method(config: Config) -> Iterator[Problem]:
    if config.quant_method == "bnb" and config.quant_bits is None:
        seen = tr("quant_method is bnb, but quant_bits is not set.")
        four = Fix(text=tr("use 4 bits, as in QLoRA"), edits={"quant_bits": "4"})
        yield problem("E386", "quant_bits", seen, "", four, _PLAIN)
    if config.quant_method in (None, "bnb"):
        return
    seen = tr(
        "quant_method is {quant_method}, but covey quantizes with bitsandbytes (bnb) only.",
        quant_method=config.quant_method,
    )
    cause = tr("ms-swift has other methods too.")
    if config.quant_method in _CALIBRATED:
        cause = tr("In ms-swift the option names how `swift export` quantizes, or how a model is stored.")
    bnb = Fix(
        text=tr("quantize with bitsandbytes, and name the unquantized model: --model DIR"),
        edits=_BITSANDBYTES,
    )
    yield problem("E386", "quant_method", seen, cause, bnb, _PLAIN)


def _dtype(config: Config) -> Iterator[Problem]:
    if config.bnb_4bit_compute_dtype == "float16" and config.quant_bits == "4":
        yield problem(
            "E319",
            "bnb_4bit_compute_dtype",
            tr("bnb_4bit_compute_dtype is float16, but this version cannot train in float16."),
            tr("float16 gradients vanish without loss scaling, which covey does not have."),
            Fix(text=tr("compute in the dtype of torch_dtype"), edits={"bnb_4bit_compute_dtype": "auto"}),
        )


def _of_model(config: Config, model: ModelFacts) -> Iterator[Problem]:
    """A model of a program, or one that is stored quantized in another way."""
    if is_live(config.model):
        seen = tr(
            "quant_bits is set, but model is a Python object, and covey quantizes only weights "
            "that it loads from files."
        )
        where = Fix(text=tr("give the directory or id of the model, not the object: model='DIR_OR_ID'"))
        yield problem("E386", "quant_bits", seen, "", where, _PLAIN)
    if model.stored_quantization is None or quantization_of(config) is None:
        return
    others = {n: v for n, v in model.stored_quantization.items() if getattr(config, n) != v}
    if others:
        shown = ", ".join(f"{n} {_shown(getattr(config, n))}" for n in others)
        held = ", ".join(f"{n} {_shown(v)}" for n, v in others.items())
        seen = tr(
            "The weights of {model} are stored with {held}, but the options say {shown}.",
            model=config.model,
            held=held,
            shown=shown,
        )
        yield problem(
            "E386", next(iter(others)), seen, "", Fix(text=tr("use the stored quantization"), edits=others)
        )


def _of_run(config: Config, facts: Facts) -> Iterator[Problem]:
    """What is to be trained, and on how many devices a model lies."""
    if quantization_of(config) is None:
        return
    if config.tuner_type != "lora":
        seen = tr(
            "quant_bits is {quant_bits}, but tuner_type is {tuner_type}; quantized weights cannot "
            "be trained.",
            quant_bits=config.quant_bits,
            tuner_type=config.tuner_type,
        )
        qlora = Fix(
            text=tr("train an adapter on the quantized weights (QLoRA)"), edits={"tuner_type": "lora"}
        )
        yield problem("E387", "quant_bits", seen, "", qlora, _PLAIN)
    layout = facts.layout
    if layout.fsdp or layout.zero_stage:
        name = "fsdp" if layout.fsdp else "deepspeed"
        what = "FSDP" if layout.fsdp else tr("DeepSpeed (ZeRO-{zero_stage})", zero_stage=layout.zero_stage)
        yield problem(
            "E387",
            name,
            tr(
                "quant_bits is {quant_bits}, but {what} shards the model over the processes.",
                quant_bits=config.quant_bits,
                what=what,
            ),
            "",
            Fix(text=tr("keep the whole quantized model in each process: leave out --{name}", name=name)),
            Fix(text=tr("shard an unquantized model: leave out --quant_bits")),
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
