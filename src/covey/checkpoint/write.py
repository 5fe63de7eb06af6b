"""Writing a checkpoint: everything into a hidden sibling, the manifest last, then one rename.

Every rank writes its own files and takes their sums while it writes; the first rank makes the directory,
lists all files in the manifest without reading them again, and renames. No rank goes on before that, and what
fails on one rank fails on all of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os.path import exists, isdir, islink
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checkpoint.exact import JSON, require_json
from covey.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    TRAINER,
    FileEntry,
    Manifest,
    hash_file,
    list_files,
)
from covey.checkpoint.registry import State
from covey.checkpoint.shards import Shard, write_shards
from covey.checkpoint.staging import hidden_sibling, store_manifest, sync_directory, sync_file, tidy
from covey.checkpoint.tensor_file import write_tensors, write_text
from covey.config.checkpoints import checkpoint_name
from covey.errors import CheckpointError, OtherRankFailed
from covey.texts import packed, tr, unpacked

if TYPE_CHECKING:
    from covey.comm import Comm

STATE_FILE = "state.json"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Entries = Mapping[str, FileEntry]
"""Files by their path in the checkpoint, each with the length and sum that it was written with."""


def write_checkpoint(
    directory: Path,
    *,
    step: int,
    write_model: Callable[[Path], Entries | None],
    states: Mapping[str, State] | None,
    meta: Mapping[str, JSON],
    shards: Mapping[str, Iterable[Shard]] | None = None,
    comm: Comm | None = None,
) -> Path:
    """Write `checkpoint-<step>` into `directory` and return its path. Collective over `comm` (None: one
    process); no other process may write there at a time.

    `write_model` writes this rank's part of weights, configuration and tokenizer into the directory it is
    given, and returns what it knows the sums of; the first rank takes those of its other files. Neither it
    nor an iteration of this rank's `shards` may have a collective. `states` are the first rank's; None keeps
    the model only. The checkpoint appears under its name once it is whole and on the disk; on any failure the
    temporary directory is removed, and a checkpoint that had the name before stays what it was.
    """
    ranks = comm or _alone()
    is_first = ranks.rank == 0
    final = directory / checkpoint_name(step)
    temporary: Path | None = None

    def begin() -> str:
        require_json(meta, "meta")
        _check_names({} if states is None else states, shards or {})
        return _begin(final).name if is_first else ""

    def write() -> dict[str, list[JSON]]:
        assert temporary is not None
        with _plain_errors(temporary):
            entries = dict(write_model(temporary) or {})
            if states is not None:
                entries |= _write_shards(temporary / TRAINER, shards or {}, ranks)
                if is_first:
                    entries |= _write_states(temporary / TRAINER, states, sorted(shards or {}))
        return {name: [e.size, e.sha256] for name, e in entries.items()}

    def seal(entries: Entries) -> None:
        if temporary is not None and is_first:
            files = _sealed(temporary, entries)
            store_manifest(temporary, Manifest(step=step, trainer=states is not None, meta=meta, files=files))
            _put_in_place(temporary, final)

    def undo() -> None:
        if is_first and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    try:
        temporary = directory / _on_every_rank(ranks, begin, undo)[0]
        written = _on_every_rank(ranks, write, undo)
        entries = {n: FileEntry(size=s, sha256=h) for own in written for n, (s, h) in own.items()}
        _on_every_rank(ranks, lambda: seal(entries), undo)
    except BaseException:
        undo()
        raise
    return final


def _alone() -> Comm:
    from covey.comm import LocalComm

    return LocalComm()


def _begin(final: Path) -> Path:
    """Make the hidden directory of a checkpoint."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _refuse_other_kind(final)
    tidy(final.parent)
    temporary = hidden_sibling(final.parent, "tmp", final.name)
    temporary.mkdir()
    return temporary


def _on_every_rank(comm: Comm, work: Callable[[], Any], undo: Callable[[], None]) -> list[Any]:
    """Do a part of the work on every rank and return the results of all. Returns after every rank is done.

    Where it fails on some, all ranks `undo` the work, and then raise what the first of these raised: a rank
    that left earlier could end the others before they are done.
    """
    own: BaseException | None = None
    result = None
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised below, once the others know of it
        own = error
    outcomes = comm.gather_json({"result": result, "error": None if own is None else _described(own)})
    failed = [
        (rank, outcome["error"]) for rank, outcome in enumerate(outcomes) if outcome["error"] is not None
    ]
    if not failed:
        return [outcome["result"] for outcome in outcomes]
    undo()
    # A rank that is gone by now is no reason to forget the error.
    with contextlib.suppress(Exception):
        comm.gather_json(None)
    rank, described = failed[0]
    raise own if own is not None and rank == comm.rank else _rebuilt(rank, described)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return {"kind": "OSError", "number": error.errno, "words": error.strerror or str(error), "path": path}
    kind = "CheckpointError" if isinstance(error, CheckpointError) else type(error).__name__
    return {"kind": kind, "words": packed(str(error))}


def _rebuilt(rank: int, error: Mapping[str, Any]) -> Exception:
    """Return the error of another rank."""
    if error["kind"] == "OSError":
        return OSError(error["number"], error["words"], error["path"])
    if error["kind"] == "CheckpointError":
        return CheckpointError(unpacked(error["words"]))
    return OtherRankFailed(
        tr(
            "rank {rank} could not write its part: {kind}: {words}",
            rank=rank,
            kind=error["kind"],
            words=unpacked(error["words"]),
        )
    )


def _refuse_other_kind(final: Path) -> None:
    """Raise FileExistsError where a file or a link has the checkpoint's name: covey does not replace it."""
    if islink(final) or (exists(final) and not isdir(final)):
        kind = tr("link") if islink(final) else tr("file")
        raise FileExistsError(
            errno.EEXIST,
            tr("a {kind} already exists under the name of the checkpoint", kind=kind),
            str(final),
        )


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


def _check_names(states: Mapping[str, State], shards: Iterable[str]) -> None:
    """Refuse names that would leave the directory or meet each other, and values that JSON would change."""
    seen: dict[str, str] = {}
    for name in (*shards, *states):
        for part in name.split("/"):
            if not _PART.fullmatch(part) or part.endswith((".safetensors", ".json")):
                raise CheckpointError(tr("{name!r} is not a valid component name", name=name))
        # Some file systems do not tell case apart; one component's tensors would overwrite the other's.
        if other := seen.get(name.lower()):
            raise CheckpointError(
                tr(
                    "the components {other!r} and {name!r} differ only in upper and lower case",
                    other=other,
                    name=name,
                )
            )
        seen[name.lower()] = name
    for name, state in states.items():
        require_json(state.json, name)


def _write_shards(trainer: Path, shards: Mapping[str, Iterable[Shard]], comm: Comm) -> dict[str, FileEntry]:
    """Write this rank's shards of every component that has them."""
    entries = {}
    for name, own in shards.items():
        file, entry = write_shards(trainer / name, own, comm.rank, comm.world)
        entries[f"{TRAINER}/{name}/{file}"] = entry
    return entries


def _write_states(trainer: Path, states: Mapping[str, State], sharded: list[str]) -> dict[str, FileEntry]:
    trainer.mkdir(exist_ok=True)
    components: dict[str, Any] = {}
    entries = {}
    for name, state in sorted(states.items()):
        components[name] = {"json": dict(state.json), "tensors": sorted(state.tensors)}
        if state.tensors:
            file = tensor_file(name)
            (trainer / file).parent.mkdir(parents=True, exist_ok=True)
            entries[f"{TRAINER}/{file}"] = write_tensors(trainer / file, state.tensors)
    body = {"format": FORMAT, "components": components, "pieces": sharded}
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    entries[f"{TRAINER}/{STATE_FILE}"] = write_text(trainer / STATE_FILE, text + "\n")
    return entries


def _sealed(temporary: Path, entries: Entries) -> dict[str, FileEntry]:
    """Hold the files that are there to what the ranks say they wrote, and put everything on the disk."""
    files = list_files(temporary)
    if lost := sorted(set(entries) - set(files)):
        raise CheckpointError(
            tr(
                "{temporary} does not contain {lost}, which another rank wrote: all ranks must use the "
                "same shared file system",
                temporary=temporary,
                lost=lost[0],
            )
        )
    others = {name: path for name, path in files.items() if name not in entries}
    reserved = [name for name in others if name.split("/")[0] == TRAINER]
    if exists(temporary / MANIFEST) or reserved:
        word = MANIFEST if not reserved else TRAINER
        raise CheckpointError(tr("the model's own files include {word}; covey reserves this name", word=word))
    # safetensors writes for its owner alone; the directory has what the user's umask leaves.
    mode = temporary.stat().st_mode & 0o666
    for path in others.values():
        path.chmod(mode)
    added = {name: _seal_file(path) for name, path in others.items()}
    for folder, _, _ in os.walk(temporary):
        sync_directory(Path(folder))
    return {**entries, **added}


def _seal_file(path: Path) -> FileEntry:
    sync_file(path)
    return FileEntry(size=path.stat().st_size, sha256=hash_file(path))


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename to the final name; what stood there comes back should anything fail."""
    aside = hidden_sibling(final.parent, "old", final.name)
    try:
        if exists(final):
            os.rename(final, aside)
        os.rename(temporary, final)
        sync_directory(final.parent)
    except BaseException:
        if not exists(temporary):
            os.rename(final, temporary)
        if exists(aside):
            os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
