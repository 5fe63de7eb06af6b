"""`--dataset` arguments: what they name, and the rows behind them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from covey.config.objects import is_live
from covey.data import jsonl, modelscope, tables
from covey.data.errors import DataError
from covey.data.lazy_rows import JsonLines, LazyRows, Row, picked
from covey.data.live import LiveRows
from covey.data.shared_files import shared_file
from covey.texts import joined, tr

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK = 10_000

_FILE_SUFFIXES = (*jsonl.SUFFIXES, *tables.FORMATS)
_TEXTS = (".jsonl", ".gz", ".json", ".csv")
_PATH_STARTS = ("./", "../", "/", "~")
# Bytes from which on a file is worth a copy in lines.
_LARGE = 2**20
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NAMED = re.compile(r"([\w.-]+)=(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One `--dataset` argument, taken apart.

    `parse_source("hf::openai/gsm8k:main@test#100")` is `DataSource(text=…, hub="hf", path="openai/gsm8k",
    subset="main", split="test", limit=100)`. `hub` is `any` for an id without a prefix, which `--use_hf`
    sends to one hub or the other; `object` stands for rows that a program holds, which `path` names; `name`
    is what was typed before a `=`.
    """

    text: str
    hub: Literal["local", "hf", "ms", "any", "object"]
    path: str
    subset: str | None = None
    split: str | None = None
    limit: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The rows of a source, and what is worth saying about how they were taken."""

    rows: Sequence[Row]
    notes: tuple[str, ...] = ()


def parse_source(text: str) -> DataSource:
    """Take `[name=][hf::|ms::]id_or_path[:subset][@split][#N]` apart; DataError says what is malformed.

    What lies on this machine under the whole text, or under what is left without `#N`, `@split` or `:subset`,
    is local, and so is what looks like a path or a data file; everything else is the id of a data set on a
    hub.
    """
    name, rest = None, text
    match = _NAMED.fullmatch(text)
    if match and not _exists(text):
        name, rest = match.groups()
    if is_live(rest):
        return DataSource(text=text, hub="object", path=rest, name=name)
    for hub in ("hf", "ms"):
        if rest.startswith(f"{hub}::"):
            return _on_hub(text, rest.removeprefix(f"{hub}::"), hub, name)
    if _exists(rest):
        return DataSource(text=text, hub="local", path=os.path.expanduser(rest), name=name)
    path, subset, split, limit = _parts(text, rest)
    if _exists(path) or path.startswith(_PATH_STARTS) or path.endswith(_FILE_SUFFIXES):
        path = os.path.expanduser(path)
        return DataSource(
            text=text, hub="local", path=path, subset=subset, split=split, limit=limit, name=name
        )
    return _on_hub(text, rest, "any", name)


def eval_name(source: DataSource) -> str:
    """A short name for metrics: the one typed before `=`, else the file's stem or the last part of the id.

    `eval_name(parse_source("data/gsm8k test.jsonl"))` is `gsm8k_test`.
    """
    last = "rows" if source.hub == "object" else os.path.basename(source.path.rstrip("/"))
    if source.hub == "local":
        suffix = next((s for s in _FILE_SUFFIXES if last.endswith(s)), "")
        last = last.removesuffix(suffix)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", source.name or last).strip("_.") or "eval"


def load_source(
    source: DataSource, *, use_hf: bool, seed: int, shuffle: bool, offline: bool = False
) -> Loaded:
    """Rows of a source; with `#N` the first N, or when `shuffle` a choice of N by `seed`, in file order.

    With `offline` nothing is asked of the network: what is not on this machine is a DataError.
    """
    rows = _rows(source, use_hf=use_hf, offline=offline)
    limit, size = source.limit, len(rows)
    if limit is None or limit >= size:
        note = tr(
            "{text} asks for {limit} rows but has only {size}: all of them are used",
            text=source.text,
            limit=limit,
            size=size,
        )
        notes = (note,) if limit is not None and limit > size else ()
        return Loaded(rows=rows, notes=notes)
    numbers = list(range(limit))
    if shuffle:
        chosen = np.random.Generator(np.random.PCG64(seed)).choice(size, limit, replace=False)
        numbers = sorted(int(i) for i in chosen)
    return Loaded(rows=picked(rows, numbers))


def stream_rows(
    sources: Sequence[DataSource],
    *,
    use_hf: bool,
    offline: bool = False,
    live: Mapping[str, LiveRows] | None = None,
) -> Callable[[], Iterator[dict[str, Any]]]:
    """A function that begins to read the sources, one after the other, anew at each call.

    `#N` ends a source after its first N rows; `live` are the objects among the sources by their names.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for source in sources:
            if source.hub == "object":
                yield from (live or {})[source.path].read()
                continue
            yield from islice(_stream(source, use_hf=use_hf, offline=offline), source.limit)

    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of one data file, as dicts."""
    return [dict(row) for row in _local_rows(path, None, None)]


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _parts(text: str, rest: str) -> tuple[str, str | None, str | None, int | None]:
    """The path and what follows it; a part that holds a slash belongs to the path."""
    limit: int | None = None
    subset = split = None
    path, mark, tail = rest.rpartition("#")
    if mark and "/" not in tail:
        if not (tail.isascii() and tail.isdigit() and int(tail) > 0):
            raise DataError(
                tr(
                    "{text}: the number of rows after # must be a whole number above 0, not {tail!r}",
                    text=text,
                    tail=tail,
                ),
                subject=text,
            )
        rest, limit = path, int(tail)
    if not _exists(rest):
        path, mark, tail = rest.rpartition("@")
        if mark and "/" not in tail:
            rest, split = path, _named(text, tail, tr("the @ must be followed by a split, as in @train"))
    if not _exists(rest):
        path, mark, tail = rest.rpartition(":")
        if mark and "/" not in tail:
            rest, subset = (
                path,
                _named(text, tail, tr("the : must be followed by a subset, as in openai/gsm8k:main")),
            )
    if not rest:
        words = tr(
            "{text!r} is not the name of a data set: give a path, or an id such as openai/gsm8k", text=text
        )
        raise DataError(words, subject=text)
    return rest, subset, split, limit


def _named(text: str, part: str, words: str) -> str:
    if not part:
        said = tr("{text}: {words}, but nothing follows it", text=text, words=words)
        raise DataError(said, subject=text)
    return part


def _on_hub(text: str, rest: str, hub: str, name: str | None) -> DataSource:
    path, subset, split, limit = _parts(text, rest)
    if not _HUB_ID.fullmatch(path):
        raise DataError(
            tr(
                "{text}: {path!r} is neither a file or directory on this machine nor the id of a data set "
                "(owner/name)",
                text=text,
                path=path,
            ),
            subject=text,
        )
    known: Literal["hf", "ms", "any"] = "hf" if hub == "hf" else "ms" if hub == "ms" else "any"
    return DataSource(text=text, hub=known, path=path, subset=subset, split=split, limit=limit, name=name)


def _rows(source: DataSource, *, use_hf: bool, offline: bool) -> Sequence[Row]:
    if source.hub == "local":
        return _local_rows(Path(source.path), source.subset, source.split)
    if _is_hf(source, use_hf):
        return TableRows(tables.load_hub(source.path, source.subset, source.split, offline=offline))
    directory = modelscope.dataset_directory(source.path, offline=offline)
    return TableRows(tables.load_directory(directory, source.subset, source.split, called=source.path))


def _is_hf(source: DataSource, use_hf: bool) -> bool:
    return source.hub == "hf" or (source.hub == "any" and use_hf)


def _local_rows(path: Path, subset: str | None, split: str | None) -> Sequence[Row]:
    if isdir(path):
        return TableRows(tables.load_directory(path, subset, split, called=str(path)))
    _check_file(path, subset, split)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    rows = _of_json(path)
    return TableRows(tables.load_file(path)) if rows is None else _as_lines(path, rows)


def _as_lines(path: Path, rows: Iterator[dict[str, Any]]) -> Sequence[Row]:
    """The rows of a JSON file that cannot be read from the middle: from lines that are written once, for all
    processes of this machine, where the file is large."""

    def write(lines: Path) -> None:
        with lines.open("w", encoding="ascii") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        if path.stat().st_size >= _LARGE and (lines := shared_file(f"{digest}.jsonl", write)) is not None:
            return JsonLines(lines)
    except OSError as error:
        words = tr("{path} could not be read: {error}", path=path, error=error)
        raise DataError(words, subject=path) from error
    return list(_of_json(path) or ())


def _of_json(path: Path) -> Iterator[dict[str, Any]] | None:
    """Rows of a JSON file; None for other formats, which `datasets` reads."""
    if path.name.endswith(jsonl.SUFFIXES):
        return jsonl.iter_jsonl(path)
    return jsonl.iter_json(path) if path.suffix == ".json" else None


def _check_file(path: Path, subset: str | None, split: str | None) -> None:
    if not isfile(path):
        raise DataError(tr("{path} does not exist", path=path), subject=path)
    if subset or split:
        typed = f":{subset}" if subset else f"@{split}"
        raise DataError(
            tr(
                "{path} is a single file without subsets or splits: remove {typed}",
                path=path,
                typed=typed,
            ),
            kind="one_file",
            subject=path,
        )
    if not path.name.endswith(_FILE_SUFFIXES):
        raise DataError(
            tr(
                "{path} does not have a format that this version reads: {file_suffixes}",
                path=path,
                file_suffixes=joined(", ", _FILE_SUFFIXES),
            ),
            subject=path,
        )
    if path.suffix in _TEXTS:
        try:
            encoding = jsonl.other_encoding(path)
        except (EOFError, OSError) as error:
            words = tr("{path} could not be read: {error}", path=path, error=error)
            raise DataError(words, subject=path) from error
        if encoding is not None:
            words = tr("{path} is {encoding} text, not UTF-8", path=path, encoding=encoding)
            raise DataError(words, kind="encoding", subject=path, encoding=encoding)


def _stream(source: DataSource, *, use_hf: bool, offline: bool) -> Iterator[dict[str, Any]]:
    path = Path(source.path)
    if source.hub == "local":
        if isdir(path):
            return tables.stream_directory(path, source.subset, source.split, called=str(path))
        _check_file(path, source.subset, source.split)
        rows = _of_json(path)
        return tables.stream_file(path) if rows is None else rows
    if _is_hf(source, use_hf):
        return tables.stream_hub(source.path, source.subset, source.split, offline=offline)
    directory = modelscope.dataset_directory(source.path, offline=offline)
    return tables.stream_directory(directory, source.subset, source.split, called=source.path)


class TableRows(LazyRows):
    """The rows of a table, whose columns lie in mapped files; images and sounds stay undecoded."""

    def __init__(self, table: Dataset) -> None:
        self._table = table
        self._columns = frozenset(table.column_names) if len(table) else frozenset()
        self._identity = ""

    def __len__(self) -> int:
        return len(self._table)

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers."""
        return [*tables.rows_of(self._table, numbers)]

    def identity(self) -> str:
        """A digest of the columns and of all that they hold."""
        if not self._identity:
            digest = hashlib.blake2b(digest_size=16)
            for start in range(0, len(self), _CHUNK):
                digest.update(tables.contents(self._table, start, min(start + _CHUNK, len(self))))
            self._identity = digest.hexdigest()
        return self._identity
