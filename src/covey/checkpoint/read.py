"""Reading checkpoints: verification without torch, then the states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.checkpoint.manifest import (
    FORMAT,
    TRAINER,
    FileEntry,
    Manifest,
    hash_file,
    list_files,
    read_manifest,
    require_states,
)
from covey.checkpoint.registry import State
from covey.checkpoint.shards import SavedShards, damaged
from covey.checkpoint.write import STATE_FILE, tensor_file
from covey.config.checkpoints import checkpoint_step, list_checkpoints
from covey.errors import CheckpointError
from covey.paths import absence
from covey.texts import tr
from covey.weight_files import DamagedFileError, read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Holds a checkpoint that was passed over, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """Holds the newest checkpoint that verifies, if there is one, and the newer ones that were passed
    over."""

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Holds a file of a checkpoint that is not what the manifest says, and how it differs; `is_surplus` if
    the manifest does not name the file."""

    file: str
    words: str
    is_surplus: bool = False

    def __str__(self) -> str:
        return tr("{file} {words}", file=self.file, words=self.words)


def verify(checkpoint: Path) -> Manifest:
    """Compare every file with the manifest and return it.

    Raises CheckpointError that names each file which is missing, surplus, of another length or of another
    content (the first five of them). Contents are read only where names and lengths agree.
    """
    return _verified(checkpoint, contents=True)


def verify_sizes(checkpoint: Path) -> Manifest:
    """Verify a checkpoint as `verify` does, without reading the contents of files."""
    return _verified(checkpoint, contents=False)


def _verified(checkpoint: Path, *, contents: bool) -> Manifest:
    manifest = read_manifest(checkpoint)
    _raise_faults(checkpoint, find_faults(checkpoint, manifest, contents=contents))
    return manifest


def find_faults(
    checkpoint: Path, manifest: Manifest, *, contents: bool = True, everything: bool = False
) -> list[Fault]:
    """Return what is wrong with the files of a checkpoint by its manifest.

    Contents are read where all names and lengths agree, or of `everything` whose length does. CheckpointError
    for a checkpoint under the name of another step, and for links and special files.
    """
    named = checkpoint_step(checkpoint.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(
            tr(
                "{checkpoint} contains the manifest of step {step}, not of its own step",
                checkpoint=checkpoint,
                step=manifest.step,
            )
        )
    try:
        files = list_files(checkpoint)
        faults = _shape_faults(files, manifest)
        if not contents or (faults and not everything):
            return faults
        alike = {n: f for n, f in files.items() if n in manifest.files and _has_length(f, manifest.files[n])}
        return faults + _content_faults(alike, {name: manifest.files[name] for name in alike})
    except OSError as error:
        raise CheckpointError(
            tr("{checkpoint} cannot be read: {error}", checkpoint=checkpoint, error=error)
        ) from error


def read_states(checkpoint: Path, *, verified: Manifest | None = None) -> dict[str, State]:
    """Return the state of every component, tensors on the CPU, bit for bit as they were saved; of those in
    shards `read_shards` gives the tensors.

    `verified` is what `verify` gave for this very checkpoint and saves reading the files twice; without it
    the trainer's files are verified here.
    """
    manifest = verified or read_manifest(checkpoint)
    require_states(checkpoint, manifest)
    trainer = checkpoint / TRAINER
    if verified is None:
        _verify_trainer(checkpoint, manifest)
    components = _read_body(checkpoint)["components"]
    return {name: _read_state(trainer, name, entry) for name, entry in components.items()}


def read_json(checkpoint: Path, component: str) -> Mapping[str, Any]:
    """Return the JSON of one component's state, without its tensors; empty where it has none."""
    entry = _read_body(checkpoint)["components"].get(component, {"json": {}})
    return dict(entry["json"])


def read_shards(checkpoint: Path) -> dict[str, SavedShards]:
    """Return the tensors of every component that each rank has written its own shards of; headers are read,
    and what is asked for later."""
    return {name: SavedShards(checkpoint / TRAINER / name) for name in _read_body(checkpoint)["pieces"]}


def state_faults(checkpoint: Path) -> list[str]:
    """Return what is wrong with the states by the headers of their files; imports no torch."""
    trainer = checkpoint / TRAINER
    try:
        body = _read_body(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    faults = []
    for name in body["pieces"]:
        try:
            SavedShards(trainer / name)
        except CheckpointError as error:
            faults.append(str(error))
    for name, entry in body["components"].items():
        try:
            held = sorted(read_header(trainer / tensor_file(name))) if entry["tensors"] else []
        except (OSError, DamagedFileError) as error:
            faults.append(str(error))
        else:
            if held != entry["tensors"]:
                faults.append(_other_tensors(f"{TRAINER}/{tensor_file(name)}", name))
    return faults


def _read_body(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / TRAINER / STATE_FILE
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise CheckpointError(
                tr(
                    "{path} has format {format!r}; this version of covey reads only format {current}",
                    path=path,
                    format=body["format"],
                    current=FORMAT,
                )
            )
        return {"components": dict(body["components"]), "pieces": list(body["pieces"])}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(tr("{path} cannot be read: {error!r}", path=path, error=error)) from error


def find_latest(output_dir: Path, *, with_trainer: bool = False) -> Latest:
    """Return the newest checkpoint that verifies, and what was passed over on the way with the reason.

    `with_trainer` passes over those that keep the model only.
    """
    skipped: list[Skipped] = []
    for path in reversed(list_checkpoints(output_dir)):
        try:
            if with_trainer:
                require_states(path, read_manifest(path))
            manifest = verify(path)
        except CheckpointError as error:
            skipped.append(Skipped(path=path, reason=str(error)))
            continue
        return Latest(path=path, manifest=manifest, skipped=tuple(skipped))
    return Latest(path=None, manifest=None, skipped=tuple(skipped))


def _verify_trainer(checkpoint: Path, manifest: Manifest) -> None:
    listed = {name: entry for name, entry in manifest.files.items() if name.startswith(f"{TRAINER}/")}
    gone = [name for name in listed if not isfile(checkpoint / name)]
    _raise_faults(checkpoint, [Fault(name, absence(checkpoint / name)) for name in gone])
    _raise_faults(checkpoint, _content_faults({name: checkpoint / name for name in listed}, listed))


def _shape_faults(files: Mapping[str, Path], manifest: Manifest) -> list[Fault]:
    faults = [Fault(name, tr("is missing")) for name in manifest.files if name not in files]
    faults += [
        Fault(name, tr("is not listed in its manifest"), is_surplus=True)
        for name in files
        if name not in manifest.files
    ]
    for name, entry in manifest.files.items():
        if name in files and (size := files[name].stat().st_size) != entry.size:
            faults.append(
                Fault(
                    name,
                    tr("has {size:,} bytes, but its manifest says {listed:,}", size=size, listed=entry.size),
                )
            )
    return faults


def _has_length(path: Path, entry: FileEntry) -> bool:
    return path.stat().st_size == entry.size


def _content_faults(files: Mapping[str, Path], entries: Mapping[str, FileEntry]) -> list[Fault]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = dict(zip(files, pool.map(hash_file, files.values()), strict=True))
    return [
        Fault(
            name,
            tr(
                "has the SHA-256 {digests}…, but its manifest says {sha256}…",
                digests=digests[name][:12],
                sha256=entry.sha256[:12],
            ),
        )
        for name, entry in entries.items()
        if digests[name] != entry.sha256
    ]


def _raise_faults(checkpoint: Path, faults: list[Fault]) -> None:
    if faults:
        raise damaged(checkpoint, [str(fault) for fault in faults])


def _read_state(trainer: Path, name: str, entry: Mapping[str, Any]) -> State:
    if not entry["tensors"]:
        return State(json=entry["json"])
    from safetensors.torch import load_file

    tensors = load_file(str(trainer / tensor_file(name)))
    if sorted(tensors) != entry["tensors"]:
        raise CheckpointError(_other_tensors(trainer / tensor_file(name), name))
    return State(json=entry["json"], tensors=tensors)


def _other_tensors(file: Path | str, component: str) -> str:
    return tr(
        "{file} does not contain the tensors that {state_file} lists for {component!r}",
        file=file,
        state_file=STATE_FILE,
        component=component,
    )
