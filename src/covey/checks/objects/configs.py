"""Configurations of peft and of transformers among the options of a Python program, which say the same as
options of covey."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.codes import CODES
from covey.config.adapters import options_of_config
from covey.config.names import look_up, normalise, switch_value
from covey.config.values import UnfitError, coerce
from covey.texts import joined, tr
from covey.types import Fix, Problem

_Read = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
_OF_4_BITS = ("quant_type", "use_double_quant", "compute_dtype", "quant_storage")
# What bitsandbytes can do beside, with what it does by default.
_USUAL = {
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
}


def with_options_of_configs(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The options with those of a LoraConfig in the place of `peft_config`, and of a BitsAndBytesConfig in
    that of `quantization_config`, and what is wrong with them.

    An option that is typed beside one must have the same value. A value of another kind stays, and is refused
    by its name as on a command line.
    """
    values, problems = dict(given), list[Problem]()
    readers: tuple[tuple[str, str, _Read, str], ...] = (
        ("peft_config", "peft_type", options_of_config, tr("covey's LoRA")),
        ("quantization_config", "llm_int8_threshold", _quantization, tr("covey's quantization")),
    )
    for argument, mark, read, whose in readers:
        key = next((name for name in values if normalise(name) == argument), None)
        as_dict = None if key is None else getattr(values[key], "to_dict", None)
        body = as_dict() if callable(as_dict) else None
        if key is None or not isinstance(body, Mapping) or mark not in body:
            continue
        kind = type(values.pop(key)).__name__
        options, others = read(body)
        if others:
            problems.append(_refused(argument, kind, options, others, whose))
        problems += _put(values, options, f"{kind} in {argument}", argument)
    return values, problems


def _quantization(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that mean what a BitsAndBytesConfig says, and what it has beside them."""
    others = [name for name, usual in _USUAL.items() if body.get(name, usual) != usual]
    if body.get("load_in_8bit"):
        return {"quant_bits": "8"}, others
    if not body.get("load_in_4bit"):
        return {}, others
    own = {f"bnb_4bit_{name}": body.get(f"bnb_4bit_{name}") for name in _OF_4_BITS}
    return {"quant_bits": "4", **{name: value for name, value in own.items() if value is not None}}, others


def _put(values: dict[str, Any], options: Mapping[str, Any], source: str, argument: str) -> list[Problem]:
    """Add options to the values, and return a problem for each that is there with another one."""
    problems = []
    beside = {look_up(name).option: name for name, value in values.items() if value is not None}
    for option, value in options.items():
        name = beside.get(option)
        if name is None:
            values[option] = value
        elif not _is_same(option, switch_value(normalise(name), values[name]), value):
            problems.append(_differs(option, name, values[name], source, value, argument))
    return problems


def _refused(
    argument: str, kind: str, options: Mapping[str, Any], others: Sequence[str], whose: str
) -> Problem:
    return Problem(
        code="E102",
        option=argument,
        seen=tr(
            "{argument} ({kind}) uses {others}, which {whose} does not support.",
            argument=argument,
            kind=kind,
            others=joined(", ", others),
            whose=whose,
        ),
        why=CODES["E102"].why,
        fixes=(Fix(text=tr("give the same as options"), edits=options),),
    )


def _differs(option: str, name: str, own: Any, source: str, value: Any, argument: str) -> Problem:
    return Problem(
        code="E106",
        option=option,
        seen=tr(
            "{option} has two values: {value} (argument {name}) and {other} ({source}).",
            option=option,
            value=own,
            name=name,
            other=value,
            source=source,
        ),
        why=tr("Both names mean the same option, and an option has only one value."),
        fixes=tuple(Fix(text=tr("leave out {name}", name=one)) for one in (name, argument)),
    )


def _is_same(option: str, own: Any, value: Any) -> bool:
    try:
        one, other = coerce(option, own), coerce(option, value)
    except UnfitError:
        return False
    return sorted(one) == sorted(other) if isinstance(one, list) and isinstance(other, list) else one == other
