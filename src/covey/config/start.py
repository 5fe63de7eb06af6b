"""The options of a run that starts from a saved adapter, which decides its own shape and names its base.

`--adapters DIR` names it, as in ms-swift; a directory of an adapter as `--model DIR` is one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import isdir
from pathlib import Path
from typing import Any

from covey.codes import CODES
from covey.config.adapters import (
    ADAPTER_CONFIG,
    AdapterFileError,
    adapter_path,
    base_of,
    is_adapter,
    read_adapter,
    weights_fault,
)
from covey.config.checkpoints import list_checkpoints
from covey.config.dialect import SOURCE
from covey.config.quantization import QUANTIZATION_FILE, adapter_quantization
from covey.config.take import Typed
from covey.options.schema import Config, default_of
from covey.texts import tr
from covey.types import Fix, Problem

START, BASE = "start", "base"
"""What ref_adapters may be beside a directory."""


@dataclass(frozen=True, slots=True)
class Start:
    """Options that follow from the adapter, with the words for where each came from, and what is wrong."""

    values: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def start_of(typed: Mapping[str, Typed]) -> Start:
    """What follows from the adapter that was typed; nothing where none was."""
    named = _named(typed)
    if named is None:
        return Start()
    option, where = named
    directory = adapter_path(where.value)
    values: dict[str, tuple[Any, str]] = {"adapters": (where.value, where.source)}
    problems: list[Problem] = []
    model = typed.get("model")
    if option == "model":
        values["adapters"] = (where.value, tr("model, which is an adapter directory"))
    elif model is not None and is_adapter(str(model.value)):
        problems += _two_adapters(model, where)
    if model is not None and is_adapter(str(model.value)):
        base, faults = _base(adapter_path(str(model.value)))
        problems += faults
        values["model"] = (
            base,
            tr(
                "base_model_name_or_path of {value}/{adapter_config}",
                value=model.value,
                adapter_config=ADAPTER_CONFIG,
            ),
        )
    source = tr("{adapter_config} of {value}", adapter_config=ADAPTER_CONFIG, value=where.value)
    tuner = typed.get("tuner_type")
    if tuner is not None and tuner.value == "full" and _is_choice("tuner_type", tuner, where):
        return Start(values, (*problems, _full(tuner, where.value)))
    values["tuner_type"] = ("lora", tr("derived from adapters"))
    try:
        options = read_adapter(directory).options
    except AdapterFileError as error:
        return Start(values, (*problems, _unusable(option, error, where.value)))
    fault = weights_fault(directory)
    if fault is not None:
        problems.append(_unusable(option, fault, where.value))
    for name, value in options.items():
        own = typed.get(name)
        if own is None or not _is_choice(name, own, where):
            values[name] = (value, source)
        elif name != "lora_dropout" and not _is_same(own.value, value):
            values[name] = (value, source)
            problems.append(_differs(name, own, value, where.value))
    return Start(quantization_of_base(directory, typed) | values, tuple(problems))


def quantization_of_base(directory: Path, typed: Mapping[str, Typed]) -> dict[str, tuple[Any, str]]:
    """The options that quantize the base of an adapter as it was quantized in training, where nobody typed
    others."""
    if typed.keys() & {"quant_bits", "quant_method"}:
        return {}
    source = tr(
        "{quantization_file} of {directory}", quantization_file=QUANTIZATION_FILE, directory=directory
    )
    said = adapter_quantization(directory)
    return {name: (value, source) for name, value in said.items() if name not in typed}


def adapter_directory(config: Config) -> Path | None:
    """The directory of the adapter that a run starts from, or None."""
    return None if config.adapters is None else adapter_path(config.adapters)


def reference_adapter(config: Config) -> Path | None:
    """The directory of the adapter that the reference of a KL term has; None where it is the base alone."""
    if config.adapters is None or config.ref_adapters == BASE:
        return None
    return adapter_path(config.adapters if config.ref_adapters == START else config.ref_adapters)


def starts_at_reference(config: Config) -> bool:
    """Whether policy and reference are one model when the run begins, so that their KL is 0."""
    directory, other = adapter_directory(config), reference_adapter(config)
    if directory is None or other is None:
        return directory == other
    return directory.resolve() == other.resolve()


def _named(typed: Mapping[str, Typed]) -> tuple[str, Typed] | None:
    """The option that names the adapter, and what was typed."""
    adapters, model = typed.get("adapters"), typed.get("model")
    if adapters is not None and adapters.value is not None:
        return "adapters", adapters
    if model is not None and is_adapter(str(model.value)):
        return "model", model
    return None


def _is_choice(name: str, own: Typed, adapter: Typed) -> bool:
    """Whether somebody chose this value for a run with the adapter: no default of ms-swift, and none that
    stands in the file of another run, where the adapter is a flag."""
    if own.source == SOURCE:
        return False
    is_flag = adapter.source.startswith(("flag ", "argument"))
    from_file = not own.source.startswith(("flag ", "argument"))
    return not (is_flag and from_file and own.value == default_of(name))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return set(one) == set(other)
    return bool(one == other)


def _two_adapters(model: Typed, adapters: Typed) -> list[Problem]:
    if Path(str(model.value)).resolve() == Path(str(adapters.value)).resolve():
        return []
    return [
        _problem(
            "E106",
            "adapters",
            tr(
                "model is {value} ({source}), which is an adapter, but adapters is also given: {adapter} "
                "({adapter_source}).",
                value=model.value,
                source=model.source,
                adapter=adapters.value,
                adapter_source=adapters.source,
            ),
            "",
            Fix(text=tr("give only one adapter: leave out --adapters, or give the base model as --model")),
        )
    ]


def _base(directory: Path) -> tuple[str, list[Problem]]:
    """The base of an adapter that was given as the model, where it can be found."""
    base = base_of(directory)
    here = adapter_path(base)
    give = Fix(text=tr("give the base model too: --model BASE --adapters {directory}", directory=directory))
    if not base:
        seen = tr(
            "{directory} is an adapter, but its {adapter_config} does not name a base model.",
            directory=directory,
            adapter_config=ADAPTER_CONFIG,
        )
        return "", [_problem("E301", "model", seen, "", give)]
    if here.is_absolute() and not isdir(here):
        seen = tr(
            "{directory} is an adapter of {base}, but {base} is not on this machine.",
            directory=directory,
            base=base,
        )
        return base, [
            _problem("E301", "model", seen, tr("The adapter may have been trained on another machine."), give)
        ]
    return base, []


def _full(tuner: Typed, where: str) -> Problem:
    return _problem(
        "E382",
        "tuner_type",
        tr("tuner_type is full ({source}), but adapters is {where}.", source=tuner.source, where=where),
        tr("In this case ms-swift ignores the adapter and trains all weights of the base model."),
        Fix(text=tr("continue to train the adapter"), edits={"tuner_type": "lora"}),
        Fix(
            text=tr(
                "train all weights of the merged model: run `covey export {where} --merge`, then give the "
                "directory that it writes as --model, without --adapters",
                where=where,
            )
        ),
    )


def _differs(name: str, own: Typed, value: Any, where: str) -> Problem:
    return _problem(
        "E382",
        name,
        tr(
            "{name} is {shown} ({source}), but the adapter {where} has {saved}.",
            name=name,
            shown=_shown(own.value),
            source=own.source,
            where=where,
            saved=_shown(value),
        ),
        "",
        Fix(text=tr("keep the adapter's value"), edits={name: value})
        if value
        else Fix(text=tr("keep the adapter's value: leave out --{name}", name=name)),
    )


def _unusable(option: str, fault: AdapterFileError, where: str) -> Problem:
    words = str(fault)
    if fault.kind == "other":
        merge = tr("merge it with peft (`merge_and_unload`), save the merged model, and give it as --model")
        return _problem("E381", option, tr("{words}.", words=words), "", Fix(text=merge))
    files = tr("adapter_config.json and adapter_model.safetensors")
    fixes = [Fix(text=tr("give the directory of the adapter, which has {files}", files=files))]
    if fault.kind == "pickled":
        convert = tr(
            'if you trust the file, save it again as safetensors: `python -c "from peft import '
            "AutoPeftModelForCausalLM as M; M.from_pretrained('{where}').save_pretrained('{where}')\"`",
            where=where,
        )
        fixes = [Fix(text=convert)]
    elif newest := [p for p in list_checkpoints(adapter_path(where)) if is_adapter(str(p))][-1:]:
        fixes = [Fix(text=tr("use this checkpoint"), edits={"adapters": str(newest[0])})]
    elif fault.kind == "absent" and where.count("/") == 1 and not where.startswith((".", "/", "~")):
        fixes.insert(
            0,
            Fix(
                text=tr("download it from its hub first: `hf download {where} --local-dir DIR`", where=where)
            ),
        )
    return _problem("E380", option, tr("{words}.", words=words), "", *fixes)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "empty"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _problem(code: str, option: str, seen: str, cause: str, *fixes: Fix) -> Problem:
    return Problem(code=code, option=option, seen=seen, why=CODES[code].why, cause=cause, fixes=fixes)
