"""A saved adapter of peft as a run sees it: the options that it decides, and why one cannot be trained on.

Read are adapter_config.json and the header of adapter_model.safetensors; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import expanduser, isdir, isfile
from pathlib import Path
from typing import Any, Literal

from covey.config.checkpoints import list_checkpoints
from covey.paths import cannot_be_read
from covey.texts import joined, tr
from covey.weight_files import DamagedFileError, StoredTensor, read_header

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PICKLED = "adapter_model.bin"
_PREFIX, _MATRIX = "base_model.model.", ".lora_A.weight"
# What the options of a run hold, or what the adapter's tensors say by their names.
_OF_NAMES = ("exclude_modules", "layers_to_transform", "layers_pattern")
_HELD = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora"),
    *_OF_NAMES,
)
# The option for each field.
_OPTIONS = {
    "r": "lora_rank",
    **{name: name for name in ("lora_alpha", "lora_dropout", "target_modules", "modules_to_save")},
    **{name: name for name in ("use_rslora", "use_dora")},
}
# What decides nothing once an adapter is trained: where it comes from, and how it was first drawn.
_SILENT = (
    *("auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config"),
)
# Other ways to draw it take a part out of the base's weights, which those of the base no longer have.
_DRAWN = (None, True, False, "eva", "gaussian", "orthogonal")


AdapterFault = Literal["damaged", "absent", "other", "pickled"]
"""A file cannot be read; no directory is there; the adapter is of a kind that covey's LoRA cannot be; its
weights are pickled."""


class AdapterFileError(ValueError):
    """A directory that holds no adapter to train on, in words, and of what kind the fault is."""

    def __init__(self, words: str, kind: AdapterFault = "damaged") -> None:
        self.kind = kind
        super().__init__(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """What a directory says of its adapter: the options of a run that it decides, and its base by its own
    word, "" where it names none."""

    options: Mapping[str, Any]
    base: str


def adapter_path(name: str) -> Path:
    """The directory that a typed name means."""
    return Path(expanduser(name))


def is_adapter(name: str) -> bool:
    """Whether a name is the path of a directory with an adapter and no model."""
    directory = adapter_path(name)
    return isfile(directory / ADAPTER_CONFIG) and not isfile(directory / "config.json")


def base_of(directory: Path) -> str:
    """The base that an adapter names; "" where nothing can be read."""
    try:
        return str(_body(directory).get("base_model_name_or_path") or "")
    except AdapterFileError:
        return ""


def read_adapter(directory: Path) -> SavedAdapter:
    """What adapter_config.json says; AdapterFileError where the adapter is none that covey's LoRA can be.

    `target_modules` and `modules_to_save` are names as these options take them. Where peft found the modules
    in another way, as by a pattern, they are the very modules that the file of weights has.
    """
    body = _body(directory)
    if "peft_type" not in body:
        raise AdapterFileError(
            tr(
                "{directory} cannot be read: it does not name a peft_type",
                directory=directory / ADAPTER_CONFIG,
            )
        )
    others = _other_parts(body)
    if others:
        words = tr(
            "the adapter {directory} uses {others}, which covey's LoRA does not support",
            directory=directory,
            others=joined(", ", others),
        )
        raise AdapterFileError(words, "other")
    weights = directory / ADAPTER_WEIGHTS
    tensors = stored(directory) if isfile(weights) else {}
    try:
        options = {
            "lora_rank": int(body["r"]),
            "lora_alpha": float(body["lora_alpha"]),
            "lora_dropout": float(body.get("lora_dropout") or 0.0),
            "target_modules": _targets(body, sorted(_matrices(tensors))),
            "modules_to_save": _saved(body, tensors),
            "use_rslora": bool(body.get("use_rslora")),
            "use_dora": bool(body.get("use_dora")),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterFileError(
            tr("{directory} cannot be read: {error!r}", directory=directory / ADAPTER_CONFIG, error=error)
        ) from error
    return SavedAdapter(options=options, base=str(body.get("base_model_name_or_path") or ""))


def options_of_config(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that mean what a LoraConfig of peft says, by its `to_dict()`, and what it has beside them.

    What it leaves to peft, as `target_modules` None, is left to covey.
    """
    others = _other_parts(body) + [name for name in _OF_NAMES if body.get(name)]
    options: dict[str, Any] = {"tuner_type": "lora"}
    for name, option in _OPTIONS.items():
        if body.get(name) is not None:
            options[option] = body[name]
    targets = options.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        others.append(tr("a pattern as target_modules ({targets})", targets=targets))
        del options["target_modules"]
    for name in ("target_modules", "modules_to_save"):
        value = options.get(name)
        if isinstance(value, set | frozenset | list | tuple):
            options[name] = sorted(value)
    return options, others


def quantized_base(directory: Path) -> tuple[str, str] | None:
    """Method and bits by which the base was quantized while the adapter was trained, by ms-swift's args.json;
    None where that says nothing of it."""
    try:
        said = json.loads((directory / "args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    method = said.get("quant_method") if isinstance(said, dict) else None
    return (str(method), str(said.get("quant_bits"))) if method else None


def same_base(one: str, other: str) -> bool:
    """Whether two names may mean one model: by their last words, as a path, a hub or its cache has them."""
    return _last_word(one) == _last_word(other)


def _last_word(name: str) -> str:
    parts = [part for part in name.replace("___", ".").split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), "")
    return (cached.rpartition("--")[2] or (parts[-1] if parts else "")).lower()


def weights_fault(directory: Path) -> AdapterFileError | None:
    """Why the weights of an adapter cannot be loaded, or None."""
    if isfile(directory / ADAPTER_WEIGHTS):
        try:
            stored(directory)
        except AdapterFileError as error:
            return error
        return None
    if isfile(directory / _PICKLED):
        words = tr(
            "{directory} has only pickled weights ({pickled}), which can run code when they are loaded, "
            "so covey does not read them",
            directory=directory,
            pickled=_PICKLED,
        )
        return AdapterFileError(words, "pickled")
    return AdapterFileError(
        tr("{directory} has no {adapter_weights}", directory=directory, adapter_weights=ADAPTER_WEIGHTS)
    )


def stored(directory: Path) -> Mapping[str, StoredTensor]:
    """The tensors of an adapter by their names within the base model; AdapterFileError where the file is
    damaged."""
    try:
        tensors = read_header(directory / ADAPTER_WEIGHTS)
    except OSError as error:
        raise AdapterFileError(cannot_be_read(error)) from error
    except DamagedFileError as error:
        raise AdapterFileError(
            tr("the weights of {directory} are damaged: {error}", directory=directory, error=error)
        ) from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _other_parts(body: Mapping[str, Any]) -> list[str]:
    """What an adapter has beside plain LoRA, by the names of adapter_config.json."""
    kind = getattr(body["peft_type"], "value", body["peft_type"])
    if kind != "LORA":
        return [tr("peft_type {peft_type}", peft_type=kind)]
    found = []
    for name, value in body.items():
        if name in (*_HELD, *_SILENT) or not value:
            continue
        if name in ("rank_pattern", "alpha_pattern"):
            usual = body.get("r" if name == "rank_pattern" else "lora_alpha")
            if isinstance(value, Mapping) and all(one == usual for one in value.values()):
                continue
        if name == "bias":
            found += [] if value == "none" else [tr("bias {value}", value=value)]
        elif name == "task_type":
            kind = getattr(value, "value", value)
            found += [] if kind == "CAUSAL_LM" else [tr("task_type {value}", value=kind)]
        elif name == "init_lora_weights":
            found += [] if value in _DRAWN else [tr("init_lora_weights {value}", value=value)]
        else:
            found.append(str(name))
    return found


def _body(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_CONFIG
    if isfile(directory):
        raise AdapterFileError(tr("{file} is a file, but an adapter is a directory", file=directory))
    if not isdir(directory):
        raise AdapterFileError(tr("{directory} is not a directory", directory=directory), "absent")
    if not isfile(path):
        newest = [p for p in list_checkpoints(directory) if isfile(p / ADAPTER_CONFIG)][-1:]
        others = (p.parent for p in sorted(directory.glob(f"*/{ADAPTER_CONFIG}")))
        inner = next(iter([*newest, *others]), None)
        hint = "" if inner is None else tr(", but {inner} has one", inner=inner)
        raise AdapterFileError(
            tr(
                "{directory} has no {adapter_config}{hint}",
                directory=directory,
                adapter_config=ADAPTER_CONFIG,
                hint=hint,
            )
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterFileError(cannot_be_read(error)) from error
    except ValueError as error:
        raise AdapterFileError(tr("{path} cannot be read: {error}", path=path, error=error)) from error
    if not isinstance(body, dict):
        raise AdapterFileError(tr("{path} cannot be read: it is not a JSON object", path=path))
    return body


def _targets(body: Mapping[str, Any], modules: list[str]) -> list[str]:
    """The names that mean the modules of the file, those of the configuration where they do."""
    named = body["target_modules"]
    names = sorted(named) if isinstance(named, list) else [str(named)]
    if not modules:
        return names
    used = [name for name in names if any(_means(name, module) for module in modules)]
    is_whole = all(any(_means(name, module) for name in used) for module in modules)
    is_plain = isinstance(named, list) and not any(body.get(name) for name in _OF_NAMES)
    return used if is_plain and is_whole else modules


def _saved(body: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """The same for modules that are trained whole, which may have others in them."""
    names = sorted(str(name) for name in body.get("modules_to_save") or ())
    modules = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    is_whole = all(any(f".{name}." in f".{module}." for name in names) for module in modules)
    return names if is_whole or not names else modules


def _matrices(tensors: Iterable[str]) -> set[str]:
    """The modules that have an adapter."""
    return {name.removesuffix(_MATRIX) for name in tensors if name.endswith(_MATRIX)}


def _means(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")
