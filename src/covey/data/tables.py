"""Every format that `datasets` reads: files, directories, data sets of the hub; the one module that imports
it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from covey.data import hub
from covey.data.errors import DataError, nearest, one_line
from covey.data.jsonl import refuse_lone_surrogates
from covey.paths import closed_within
from covey.plan.reasons import DataFault
from covey.texts import joined, tr

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS: Mapping[str, str] = {".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}

_CHUNK = 10_000
_T = TypeVar("_T")


def rows_of(table: Dataset, numbers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The rows of these numbers, or all, as dicts; images and sounds stay undecoded."""
    numbers = range(len(table)) if numbers is None else numbers
    if has_media := _has_media(table.features):
        table = table.with_format("arrow")
    rows: list[dict[str, Any]] = []
    for start in range(0, len(numbers), _CHUNK):
        part = table[_key(numbers[start : start + _CHUNK])]
        if has_media:
            rows += part.to_pylist()
            continue
        names = list(part)
        rows += [dict(zip(names, values, strict=True)) for values in zip(*part.values(), strict=True)]
    return rows


def contents(table: Dataset, start: int, stop: int) -> Any:
    """The columns and the rows from one number to another, as the bytes of an Arrow stream."""
    import pyarrow

    part = table.with_format("arrow")[start:stop]
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, part.schema) as stream:
        stream.write_table(part)
    return sink.getvalue()


def _key(numbers: Sequence[int]) -> slice | list[int]:
    """What a table is asked with for these rows: a slice, which costs least, where they follow each other."""
    if isinstance(numbers, range) and numbers.step == 1:
        return slice(numbers.start, numbers.stop)
    return list(numbers)


def library() -> Any:
    """The module `datasets`, for what makes data sets for a program."""
    import datasets

    return datasets


def load_file(path: Path) -> Dataset:
    """A .json, .csv, .parquet or .arrow file."""
    _refuse_other_separators(path)
    return _read(str(path), None, None, lambda d: _load(d, **_file(path)))


def stream_file(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of such a file, without holding them all."""
    _refuse_other_separators(path)
    if path.suffix == ".parquet":
        return _rows(str(path), lambda _: _parquet_rows(path))
    return _rows(str(path), lambda d: _load(d, **_file(path), streaming=True))


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read by pyarrow itself: the scanner through which `datasets` streams can hang where its rows are not
    read to the end (apache/arrow#45214)."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK):
            yield from batch.to_pylist()


def _refuse_other_separators(path: Path) -> None:
    """DataError for a CSV file whose first line has no comma and another separator."""
    if path.suffix != ".csv":
        return
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    for separator, name in ((b";", "';'"), (b"\t", tr("a tab")), (b"|", "'|'")):
        if separator in first and b"," not in first:
            words = tr("{path} separates its columns with {name}: use commas instead", path=path, name=name)
            raise DataError(words, subject=path)


def load_directory(path: Path, subset: str | None, split: str | None, *, called: str) -> Dataset:
    """A directory that `datasets` saved, or one of data files."""

    def load(datasets: Any) -> Any:
        _refuse_closed(path)
        if _is_saved(path):
            return _saved(datasets, path, split, called)
        refuse_lone_surrogates(path)
        return _load(datasets, **_named(str(path), subset, split))

    return _read(called, subset, split, load)


def _refuse_closed(directory: Path) -> None:
    """`datasets` leaves out a directory that it cannot list."""
    if closed := closed_within(directory):
        raise DataError(closed, subject=directory)


def stream_directory(
    path: Path, subset: str | None, split: str | None, *, called: str
) -> Iterator[dict[str, Any]]:
    """Rows of a directory, without holding them all."""

    def load(datasets: Any) -> Any:
        _refuse_closed(path)
        if _is_saved(path):
            return _saved(datasets, path, split, called).to_iterable_dataset()
        refuse_lone_surrogates(path)
        return _load(datasets, **_named(str(path), subset, split), streaming=True)

    return _rows(called, load, subset, split)


def load_hub(name: str, subset: str | None, split: str | None, *, offline: bool) -> Dataset:
    """A data set of the hub, or its cached copy where there is no network."""
    silence = hub.silence_about(name, offline=offline)
    if silence is not None:
        return _cached(name, subset, split, silence)
    return _read(name, subset, split, lambda d: _load(d, **_named(name, subset, split)))


def stream_hub(
    name: str, subset: str | None, split: str | None, *, offline: bool
) -> Iterator[dict[str, Any]]:
    """Rows of a data set of the hub as they arrive; of its cached copy where there is no network."""
    silence = hub.silence_about(name, offline=offline)
    if silence is not None:
        return _rows(name, lambda _: _cached(name, subset, split, silence).to_iterable_dataset())
    return _rows(name, lambda d: _load(d, **_named(name, subset, split), streaming=True), subset, split)


def of_frame(frame: Any) -> Dataset:
    """A DataFrame of pandas as a table, in which an empty cell is None and no number."""
    import datasets

    return datasets.Dataset.from_pandas(frame, preserve_index=False)


def plain(dataset: Any) -> Any:
    """A data set whose rows hold Python's own values, whatever its format is; a transform of the user's
    stays."""
    is_formatted = getattr(dataset, "format", {}).get("type") not in (None, "custom")
    streams = getattr(getattr(dataset, "_formatting", None), "format_type", None) not in (None, "custom")
    return dataset.with_format(None) if is_formatted or streams else dataset


def stream_live(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of an IterableDataset from its beginning."""
    return _rows("dataset", lambda _: dataset)


def _cached(name: str, subset: str | None, split: str | None, silence: hub.Silence) -> Dataset:
    """The table that `datasets` made of it once, else the files that lie in the hub's cache."""

    def load(datasets: Any) -> Any:
        try:
            return _load(datasets, **_named(name, subset, split))
        except (ConnectionError, FileNotFoundError) as error:
            directory = hub.cached_dataset(name)
            if directory is None:
                raise hub.not_cached_dataset(name, silence) from error
            return _load(datasets, **_named(str(directory), subset, split))

    with _no_network():
        return _read(name, subset, split, load)


def _named(path: str, subset: str | None, split: str | None) -> dict[str, Any]:
    return {"path": path, "name": subset, "split": split or "train"}


def _file(path: Path) -> dict[str, Any]:
    options = {"path": FORMATS[path.suffix], "data_files": str(path), "split": "train"}
    # An answer may be the word None or NA; only a cell without text is none.
    return options | ({"keep_default_na": False, "na_values": [""]} if path.suffix == ".csv" else {})


def _load(datasets: Any, **options: Any) -> Any:
    return datasets.load_dataset(**options)


def _is_saved(path: Path) -> bool:
    return any(isfile(path / file) for file in ("state.json", "dataset_dict.json"))


def _saved(datasets: Any, path: Path, split: str | None, called: str) -> Any:
    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        if split:
            raise DataError(
                tr(
                    "{called} is a single table without splits: remove @{split}",
                    called=called,
                    split=split,
                ),
                subject=called,
            )
        return loaded
    if (split or "train") not in loaded:
        raise DataError(_no_split(called, split, list(loaded)), subject=called)
    return loaded[split or "train"]


def _read(called: str, subset: str | None, split: str | None, load: Callable[[Any], _T]) -> _T:
    import datasets

    datasets.disable_progress_bars()
    # What it logs about a file that it cannot read is in the error, too.
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return load(datasets)
    except DataError:
        raise
    except (
        *(datasets.exceptions.DatasetsError, hub.http_error()),
        *(ValueError, OSError, RuntimeError, NotImplementedError, TypeError, KeyError),
    ) as error:
        words, kind = _explained(error, called, subset, split)
        raise DataError(words, kind=kind, subject=called) from error


def _rows(
    called: str, load: Callable[[Any], Any], subset: str | None = None, split: str | None = None
) -> Iterator[dict[str, Any]]:
    rows = iter(_read(called, subset, split, lambda d: _dicts(_undecoded(load(d)))))
    while True:
        row = _read(called, subset, split, lambda _: next(rows, None))
        if row is None:
            return
        yield row


def _dicts(rows: Any) -> Iterator[dict[str, Any]]:
    return (dict(row) for row in rows)


def _undecoded(stream: Any) -> Any:
    # A stream whose columns are not known yet holds text and numbers only, and refuses to be told.
    return stream.decode(False) if getattr(stream, "features", None) else stream


def _has_media(feature: Any) -> bool:
    """Whether a column, or anything within it, would be decoded to a picture or a sound."""
    import datasets

    if isinstance(feature, dict):
        return any(_has_media(inner) for inner in feature.values())
    if isinstance(feature, datasets.List | datasets.LargeList):
        return _has_media(feature.feature)
    return isinstance(feature, datasets.Image | datasets.Audio | datasets.Video)


@contextmanager
def _no_network() -> Iterator[None]:
    """`datasets` as if HF_HUB_OFFLINE were set."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        with hub.no_network():
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _explained(error: Exception, called: str, subset: str | None, split: str | None) -> tuple[str, DataFault]:
    """What `datasets` meant, and what kind of fault that is; it tells by its words alone."""
    words = one_line(error)
    if kind := re.search(r"Arrow type (.+) does not have a datasets dtype", words):
        said = tr(
            "{called} cannot be read: {column_of} the Arrow type {kind}",
            called=called,
            column_of=_column_of(kind[1], Path(called)),
            kind=kind[1],
        )
        return said, "arrow_type"
    if (part := _no_such_part(words, called, subset, split)) is not None:
        return part, ""
    if isinstance(error.__cause__, UnicodeDecodeError) or isinstance(error, UnicodeDecodeError):
        inner = one_line(error.__cause__ or error)
        return tr("{called} is not UTF-8 text: {one_line}", called=called, one_line=inner), "encoding"
    cause = one_line(error.__cause__) if error.__cause__ is not None else ""
    said = tr(
        "{called} could not be read: {words}{reason}",
        called=called,
        words=words,
        reason=tr(" ({cause})", cause=cause) if cause and cause not in words else "",
    )
    return said, ""


def _no_such_part(words: str, called: str, subset: str | None, split: str | None) -> str | None:
    """What is said of a split, a subset or an access that is not there."""
    there = re.findall(r"['\"]([^'\"]+)['\"]", words.partition("[")[2])
    if "Unknown split" in words or "Bad split" in words:
        return _no_split(called, split, there)
    if "Config name is missing" in words:
        first = there[0] if there else "NAME"
        return tr(
            "{called} has subsets: choose one, as in {called}:{first}; the subsets are: {there}",
            called=called,
            first=first,
            there=joined(", ", there),
        )
    if subset and ("BuilderConfig" in words or "for config" in words):
        return tr(
            "{called} has no subset {subset}{nearest}; the subsets are: {there}",
            called=called,
            subset=subset,
            nearest=nearest(subset, there),
            there=joined(", ", there),
        )
    if "gated dataset" in words:
        return tr(
            "{called} is gated: request access on its page, then log in with `hf auth login` or HF_TOKEN",
            called=called,
        )
    return None


def _column_of(kind: str, path: Path) -> str:
    """The column of a file that has an Arrow type, as the beginning of a sentence."""
    import pyarrow
    import pyarrow.parquet

    schema = None
    try:
        if path.suffix == ".parquet":
            schema = pyarrow.parquet.read_schema(path)
        elif path.suffix == ".arrow":
            with pyarrow.OSFile(str(path)) as file:
                schema = pyarrow.ipc.open_stream(file).schema
    except (OSError, pyarrow.ArrowInvalid):
        return tr("a column has")
    name = next((field.name for field in schema or () if kind in str(field.type)), None)
    return tr("a column has") if name is None else tr("the column {name} has", name=name)


def _no_split(called: str, split: str | None, there: Sequence[str]) -> str:
    name = split or "train"
    typed = tr("; write {called}@{there}", called=called, there=there[0]) if split is None and there else ""
    return tr(
        "{called} has no split {name}{nearest}; the splits are: {there}{typed}",
        called=called,
        name=name,
        nearest=nearest(name, there),
        there=joined(", ", there),
        typed=typed,
    )
