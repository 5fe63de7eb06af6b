"""What is wrong with a checkpoint, all of it: `covey verify`. Imports no torch and loads no weight.

A checkpoint of a run is held to its manifest, byte for byte. A directory that save_pretrained wrote has none:
there the headers of its files, its index and its config.json are held to each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any, Literal

from covey.checkpoint.manifest import FORMAT, MANIFEST, TRAINER, Manifest, read_manifest
from covey.checkpoint.read import Fault, find_faults, state_faults
from covey.config.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from covey.config.checkpoints import checkpoint_step, list_checkpoints
from covey.data.config_values import impossible_size
from covey.data.model_files import quantization, tokenizer_problem
from covey.errors import CheckpointError
from covey.models.adapter_shapes import adapter_settings
from covey.models.config_shapes import config_fault, shapes_of_config
from covey.models.fit import unfit_words
from covey.paths import cannot_be_read, trouble
from covey.texts import tr
from covey.weight_files import (
    INDEX,
    WHOLE,
    DamagedFileError,
    StoredTensor,
    read_header,
    stored_tensors,
    weight_files,
    weight_map,
)

# The head of a language model, and that of a classifier, whose rows are labels.
_HEAD, _SCORE = "lm_head.weight", "score.weight"
_CONFIG = "config.json"
_OBJECTS = ("generation_config.json", "tokenizer_config.json")
_NO_MANIFEST = tr(
    "no {manifest}, so the contents cannot be checked against what was written", manifest=MANIFEST
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was found in a directory: `faults` name every file, tensor or row at fault, `notes` say what could
    not be compared. `kind` "none" is neither a checkpoint nor a model, for the reason in `faults`."""

    path: Path
    kind: Literal["checkpoint", "model", "none"]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: int | None = None
    num_files: int = 0
    num_bytes: int = 0
    goes_on: bool = False
    """Whether a run can go on from it."""


def examine(path: Path) -> Examined:
    """Examine a directory, every file of it."""
    if (why := neither(path)) is not None:
        return Examined(path=path, kind="none", faults=(why,))
    try:
        if exists(path / MANIFEST):
            return _examine_checkpoint(path)
        return _examine_plain(path)
    except OSError as error:
        return Examined(path=path, kind="model", faults=(cannot_be_read(error),))


def neither(path: Path) -> str | None:
    """Return why a path is neither a checkpoint nor a model, and None where it is one; no file is read."""
    if (found := trouble(path)) is not None:
        return found.words
    if not exists(path):
        return tr("no such file or directory")
    if not isdir(path):
        return tr("not a directory")
    names = (MANIFEST, TRAINER, WHOLE, INDEX, _CONFIG, ADAPTER_CONFIG)
    if any(exists(path / name) for name in names):
        return None
    if runs := list_checkpoints(path):
        return tr("it is the directory of a run, whose newest checkpoint is {newest}", newest=runs[-1])
    return tr(
        "it has no {manifest}, no {config} and no {adapter_config}",
        manifest=MANIFEST,
        config=_CONFIG,
        adapter_config=ADAPTER_CONFIG,
    )


def _examine_checkpoint(path: Path) -> Examined:
    try:
        manifest = read_manifest(path)
        every_fault = find_faults(path, manifest, everything=True)
    except CheckpointError as error:
        return Examined(path=path, kind="checkpoint", faults=(str(error),), step=checkpoint_step(path.name))
    by_manifest = [fault for fault in every_fault if not _is_of_reduction(fault, manifest)]
    of_trainer = [fault for fault in by_manifest if _is_of_trainer(fault.file)]
    faults = [str(fault) for fault in by_manifest]
    notes: list[str] = []
    is_model_whole = len(of_trainer) == len(by_manifest)
    if _goes_on(manifest) and not of_trainer:
        faults += state_faults(path)
    if is_model_whole:
        found, notes = _model_faults(path)
        faults += found
        if of_trainer and not found:
            notes.append(
                tr(
                    "the model in it is complete: `covey export` can copy it, and a new run can start "
                    "from it; only a resume needs the missing or damaged files"
                )
            )
    if len(by_manifest) < len(every_fault):
        notes.append(
            tr(
                "the run ended while it was deleting this checkpoint's trainer state; the next save "
                "finishes that"
            )
        )
    if manifest.format != FORMAT:
        notes.append(
            tr(
                "it has format {format}: no run can resume from it, but its model can still be loaded",
                format=manifest.format,
            )
        )
    return Examined(
        path=path,
        kind="checkpoint",
        faults=tuple(faults),
        notes=tuple(notes),
        step=manifest.step,
        num_files=len(manifest.files),
        num_bytes=manifest.size,
        goes_on=_goes_on(manifest) and not faults,
    )


def _is_of_reduction(fault: Fault, manifest: Manifest) -> bool:
    """Whether a file is what a reduction to the model leaves that was ended in its middle."""
    of_trainer = fault.is_surplus and _is_of_trainer(fault.file) and not manifest.trainer
    return of_trainer or _is_leftover(fault)


def _goes_on(manifest: Manifest) -> bool:
    return manifest.trainer and manifest.format == FORMAT


def _examine_plain(path: Path) -> Examined:
    """A directory without a manifest."""
    if isdir(path / TRAINER):
        fault = tr(
            "{manifest} is missing: the checkpoint was not completely written, or only partly copied",
            manifest=MANIFEST,
        )
        return Examined(path=path, kind="checkpoint", faults=(fault,), step=checkpoint_step(path.name))
    faults, notes = _model_faults(path)
    if not isfile(path / ADAPTER_CONFIG) and (lacking := tokenizer_problem(path)) is not None:
        notes.append(tr("{words}; a tokenizer is needed to make prompts", words=lacking.words))
    files = [file for file in path.iterdir() if isfile(file)]
    return Examined(
        path=path,
        kind="model",
        faults=tuple(faults),
        notes=(_NO_MANIFEST, *notes),
        num_files=len(files),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def faults_of_model(path: Path) -> list[str]:
    """What is wrong with the model or the adapter of a directory, by its manifest where it has one; a
    trainer's state is not asked for."""
    try:
        faults: list[Fault] = []
        if exists(path / MANIFEST):
            manifest = read_manifest(path)
            kept = {n: entry for n, entry in manifest.files.items() if not _is_of_trainer(n)}
            faults = find_faults(path, replace(manifest, files=kept), everything=True)
        by_manifest = [str(f) for f in faults if not _is_of_trainer(f.file) and not _is_leftover(f)]
        return by_manifest or _model_faults(path)[0]
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [tr("it cannot be read: {error}", error=error)]


def _is_of_trainer(file: str) -> bool:
    return file.startswith(f"{TRAINER}/")


def _is_leftover(fault: Fault) -> bool:
    """Whether a reduction to the model that was ended in its middle has left the file."""
    return fault.is_surplus and fault.file == f".{MANIFEST}.tmp"


def _model_faults(path: Path) -> tuple[list[str], list[str]]:
    """What is wrong with the model of a directory, or with its adapter; and what could not be compared."""
    try:
        if isfile(path / ADAPTER_CONFIG):
            return list(_adapter_faults(path)), []
        return _weight_faults(path)
    except (DamagedFileError, CheckpointError) as error:
        return [str(error)], []


def _adapter_faults(path: Path) -> Iterator[str]:
    adapter_settings(path)
    if not isfile(path / ADAPTER_WEIGHTS):
        yield tr("{adapter_weights} is missing", adapter_weights=ADAPTER_WEIGHTS)
    elif not read_header(path / ADAPTER_WEIGHTS):
        yield tr("{adapter_weights} contains no tensors", adapter_weights=ADAPTER_WEIGHTS)


def _weight_faults(path: Path) -> tuple[list[str], list[str]]:
    config = _json_of(path / _CONFIG)
    faults = [tr("{config} is missing or cannot be read", config=_CONFIG)] if config is None else []
    faults += [
        tr("{name} is not a JSON object", name=name)
        for name in _OBJECTS
        if isfile(path / name) and _json_of(path / name) is None
    ]
    try:
        index, files = weight_map(path), weight_files(path)
        if not files:
            return [*faults, tr("there is neither {whole} nor {index}", whole=WHOLE, index=INDEX)], []
        if missing := [tr("{name} is missing", name=file.name) for file in files if not isfile(file)]:
            return [*faults, *missing], []
        tensors = stored_tensors(path)
    except DamagedFileError as error:
        return [*faults, str(error)], []
    if not tensors:
        return [*faults, tr("{name} contains no tensors", name=files[0].name)], []
    if index is not None and (lost := sorted(set(tensors) - set(index))):
        faults.append(
            tr(
                "{lost} is in {name}, but {index} does not list it",
                lost=lost[0],
                name=tensors[lost[0]].file.name,
                index=INDEX,
            )
        )
    surplus = sorted({file.name for file in path.glob("model*.safetensors")} - {file.name for file in files})
    why = "" if index is None else tr(": the index does not list it")
    faults += [tr("{name} is a weight file that is not loaded{why}", name=name, why=why) for name in surplus]
    if config is None:
        return faults, []
    if (odd := impossible_size(config)) is not None:
        return [*faults, tr("{config}: {odd}", config=_CONFIG, odd=odd)], []
    unfit, notes = _held_to_config(config, tensors)
    return [*faults, *unfit], notes


def _held_to_config(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> tuple[list[str], list[str]]:
    if (words := config_fault(config, len(tensors))) is not None:
        return [words], []
    if (method := quantization(config)) is not None:
        return [], [
            tr("tensor shapes were not checked: the weights are quantized by {method}", method=method)
        ]
    try:
        expected = shapes_of_config(config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        return [tr("{config} does not describe a model: {error}", config=_CONFIG, error=error)], []
    if expected is None:
        family = config.get("model_type", "unknown")
        return [], [
            tr(
                "tensor shapes were not checked: covey does not know the layers of model_type {family}",
                family=family,
            )
        ]
    names = {*expected.tensors}
    if any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or []):
        names = names - {_HEAD} | {_SCORE}
    missing = [name for name in names if name not in tensors]
    odd = [
        (n, tensors[n].shape, s)
        for n, s in expected.tensors.items()
        if n in tensors and tensors[n].shape != s
    ]
    surplus = sorted(set(tensors) - set(expected.tensors))
    words = unfit_words(str(config.get("model_type")), missing, odd, surplus)
    return [words] if words else [], []


def _json_of(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
