"""Writing a checkpoint: everything into a hidden sibling, the manifest last, then one rename."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.exact import JSON, require_json
from covey.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    TRAINER,
    FileEntry,
    Manifest,
    checkpoint_name,
    hash_file,
    list_files,
)
from covey.checkpoint.registry import State
from covey.checkpoint.staging import hidden_sibling, store_manifest, sync_directory, sync_file, tidy
from covey.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE = "state.json"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADAM_BYTES = 8
_MASTER_BYTES = 4


def forecast_bytes(num_params: int, dtype_bytes: int, with_optimizer: bool, with_master: bool) -> int:
    """Return the bytes of a checkpoint's tensors.

    The model takes `dtype_bytes` a parameter, AdamW's two fp32 moments 8, the fp32 masters 4:
    `forecast_bytes(1_000, 2, True, True)` is 14,000.
    """
    per_param = dtype_bytes + _ADAM_BYTES * with_optimizer + _MASTER_BYTES * with_master
    return num_params * per_param


def write_checkpoint(
    directory: Path,
    *,
    step: int,
    write_model: Callable[[Path], None],
    states: Mapping[str, State] | None,
    meta: Mapping[str, JSON],
) -> Path:
    """Write `checkpoint-<step>` into `directory` and return its path.

    `write_model` saves weights, configuration and tokenizer into the directory it is given. `states` None
    keeps the model only. The checkpoint appears under its name once it is whole and on the disk; on any
    failure the temporary directory is removed, and a checkpoint that had the name before stays what it was.
    One process may write at a time.
    """
    require_json(meta, "meta")
    if states is not None:
        _check_states(states)
    directory.mkdir(parents=True, exist_ok=True)
    _refuse_other_kind(directory / checkpoint_name(step))
    tidy(directory)
    temporary = hidden_sibling(directory, "tmp", checkpoint_name(step))
    temporary.mkdir()
    try:
        with _plain_errors(temporary):
            write_model(temporary)
        for reserved in (TRAINER, MANIFEST):
            if (temporary / reserved).exists():
                raise CheckpointError(f"the model's own files include {reserved}, a name that is reserved")
        if states is not None:
            with _plain_errors(temporary):
                _write_states(temporary / TRAINER, states)
        _seal(temporary, step=step, trainer=states is not None, meta=meta)
        return _put_in_place(temporary, directory / checkpoint_name(step))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _refuse_other_kind(final: Path) -> None:
    """FileExistsError where a file or a link has the checkpoint's name: it is not ours to replace."""
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        kind = "link" if final.is_symlink() else "file"
        raise FileExistsError(errno.EEXIST, f"a {kind} has the name of a checkpoint", str(final))


@contextmanager
def _plain_errors(directory: Path) -> Iterator[None]:
    """Raise what safetensors says of a full disk, and the like, as the OSError that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(directory)
        raise
    except (SafetensorError, CheckpointError) as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(directory)) from error


def tensor_file(component: str) -> str:
    """Return where a component's tensors lie below trainer/: "rng/0.safetensors" for "rng/0"."""
    return f"{component}.safetensors"


def _check_states(states: Mapping[str, State]) -> None:
    """Refuse names that would leave the directory or meet each other, and values that JSON would change."""
    seen: dict[str, str] = {}
    for name, state in states.items():
        for part in name.split("/"):
            if not _PART.fullmatch(part) or part.endswith((".safetensors", ".json")):
                raise CheckpointError(f"{name!r} cannot name a component: it becomes a path of files")
        # Some file systems do not tell case apart; one component's tensors would overwrite the other's.
        if other := seen.get(name.lower()):
            raise CheckpointError(f"the components {other!r} and {name!r} differ in case only")
        seen[name.lower()] = name
        require_json(state.json, name)


def _write_states(trainer: Path, states: Mapping[str, State]) -> None:
    trainer.mkdir()
    components: dict[str, Any] = {}
    for name, state in sorted(states.items()):
        components[name] = {"json": dict(state.json), "tensors": sorted(state.tensors)}
        if state.tensors:
            _write_tensors(trainer / tensor_file(name), name, state.tensors)
    body = {"format": FORMAT, "components": components}
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    (trainer / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def _write_tensors(path: Path, component: str, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(_detached(tensors), str(path))
    except (SafetensorError, RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the tensors of {component!r} cannot be written: {error}") from error


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies or views on the CPU, no two on one storage, as the file format asks."""
    storages: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.untyped_storage().data_ptr() in storages:
            flat = flat.clone()
        storages.add(flat.untyped_storage().data_ptr())
        plain[name] = flat
    return plain


def _seal(temporary: Path, *, step: int, trainer: bool, meta: Mapping[str, JSON]) -> None:
    """Put every file on the disk, then list them all in the manifest."""
    files = list_files(temporary)
    # safetensors writes for its owner alone; the directory has what the user's umask leaves.
    mode = temporary.stat().st_mode & 0o666
    for path in files.values():
        path.chmod(mode)
    with ThreadPoolExecutor(max_workers=4) as pool:
        entries = list(pool.map(_seal_file, files.values()))
    for folder, _, _ in os.walk(temporary):
        sync_directory(Path(folder))
    listed = dict(zip(files, entries, strict=True))
    store_manifest(temporary, Manifest(step=step, trainer=trainer, meta=meta, files=listed))


def _seal_file(path: Path) -> FileEntry:
    sync_file(path)
    return FileEntry(size=path.stat().st_size, sha256=hash_file(path))


def _put_in_place(temporary: Path, final: Path) -> Path:
    """Rename to the final name; what stood there comes back should anything fail."""
    aside = hidden_sibling(final.parent, "old", final.name)
    try:
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        sync_directory(final.parent)
    except BaseException:
        if not temporary.exists():
            os.rename(final, temporary)
        if aside.exists():
            os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return final
