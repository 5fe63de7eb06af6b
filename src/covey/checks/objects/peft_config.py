"""A LoraConfig of peft among the options of a Python program, which says the same as options of covey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.codes import CODES
from covey.config.adapters import options_of_config
from covey.config.names import look_up, normalise, switch_value
from covey.config.values import UnfitError, coerce
from covey.texts import joined, tr
from covey.types import Fix, Problem


def with_adapter_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The options with those of a LoraConfig in the place of `peft_config`, and what is wrong with it.

    An option that is typed beside it must have the same value. A value of `peft_config` that is no
    configuration of peft stays, and is refused by its name as on a command line.
    """
    values = dict(given)
    key = next((name for name in values if normalise(name) == "peft_config"), None)
    as_dict = None if key is None else getattr(values[key], "to_dict", None)
    body = as_dict() if callable(as_dict) else None
    if key is None or not isinstance(body, Mapping) or "peft_type" not in body:
        return values, []
    kind = type(values.pop(key)).__name__
    options, others = options_of_config(body)
    problems = [_refused(kind, options, others)] if others else []
    beside = {look_up(name).option: name for name, value in values.items() if value is not None}
    for option, value in options.items():
        name = beside.get(option)
        if name is None:
            values[option] = value
        elif not _is_same(option, switch_value(normalise(name), values[name]), value):
            problems.append(_differs(option, name, values[name], kind, value))
    return values, problems


def _refused(kind: str, options: Mapping[str, Any], others: Sequence[str]) -> Problem:
    return Problem(
        code="E102",
        option="peft_config",
        seen=tr(
            "peft_config ({kind}) uses {others}, which covey's LoRA does not support.",
            kind=kind,
            others=joined(", ", others),
        ),
        why=CODES["E102"].why,
        fixes=(Fix(text=tr("give the adapter as options"), edits=options),),
    )


def _differs(option: str, name: str, own: Any, kind: str, value: Any) -> Problem:
    return Problem(
        code="E106",
        option=option,
        seen=tr(
            "{option} has two values: {value} (argument {name}) and {other} ({kind} in peft_config).",
            option=option,
            value=own,
            name=name,
            other=value,
            kind=kind,
        ),
        why=tr("Both names mean the same option, and an option has only one value."),
        fixes=tuple(Fix(text=tr("leave out {name}", name=one)) for one in (name, "peft_config")),
    )


def _is_same(option: str, own: Any, value: Any) -> bool:
    try:
        one, other = coerce(option, own), coerce(option, value)
    except UnfitError:
        return False
    return sorted(one) == sorted(other) if isinstance(one, list) and isinstance(other, list) else one == other
