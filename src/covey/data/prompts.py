"""Sequences of prompts that read a prompt when it is asked for: from a file, or from another sequence."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from covey.errors import CoveyError
from covey.types import Origin, Prompt

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Field = Literal["id", "token_ids", "columns", "task", "pass_rate"]

NO_ORIGIN = Origin(epoch=-1, rollout=-1)
_SUMMARY = b"summary"
_JSON_TYPES = (str, int, float, bool, type(None))


class NotJson(CoveyError):
    """Raised for a value that would not come back from JSON as it is."""


class LazyPrompts(Sequence[Prompt]):
    """A sequence of prompts that are made anew each time they are asked for; a slice is a tuple of them."""

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a number, from 0 on."""
        raise NotImplementedError

    def values(self, name: Field) -> Iterator[Any]:
        """Return a field of every prompt, without the others."""
        return (self.value(number, name) for number in range(len(self)))

    def value(self, number: int, name: Field) -> Any:
        """Return a field of the prompt of a number, without the others."""
        raise NotImplementedError

    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the tokens of each prompt."""
        raise NotImplementedError

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Prompt, ...]: ...

    def __getitem__(self, number: int | slice) -> Prompt | tuple[Prompt, ...]:
        found = range(len(self))[number]
        return self.prompt(found) if isinstance(found, int) else tuple(self.prompt(n) for n in found)

    def __iter__(self) -> Iterator[Prompt]:
        return (self.prompt(number) for number in range(len(self)))


class StoredPrompts(LazyPrompts):
    """Reads the prompts of a file that `write_prompts` has written, mapped into memory."""

    def __init__(self, batches: Sequence[RecordBatch]) -> None:
        self._batches = batches
        self._ends = [*accumulate(batch.num_rows for batch in batches)]
        self._lengths = np.concatenate([_lengths(batch) for batch in batches] or [np.zeros(0, np.int64)])

    def __len__(self) -> int:
        return len(self._lengths)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a number."""
        batch, row = self._at(number)
        fields = {name: decoded(batch.column(name)[row]) for name, decoded in _DECODED.items()}
        return Prompt(**fields, origin=NO_ORIGIN)

    def values(self, name: Field) -> Iterator[Any]:
        """Return a field of every prompt, without the others."""
        if name == "pass_rate":
            return repeat(None, len(self))
        return (_DECODED[name](value) for batch in self._batches for value in batch.column(name))

    def value(self, number: int, name: Field) -> Any:
        """Return a field of the prompt of a number, without the others."""
        batch, row = self._at(number)
        return None if name == "pass_rate" else _DECODED[name](batch.column(name)[row])

    def _at(self, number: int) -> tuple[RecordBatch, int]:
        index = bisect_right(self._ends, number)
        batch = self._batches[index]
        return batch, number - (self._ends[index] - batch.num_rows)

    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the tokens of each prompt."""
        return self._lengths


class ChosenPrompts(LazyPrompts):
    """Chooses prompts of another sequence by their numbers, with measured pass rates in place of theirs; NaN
    is none."""

    def __init__(self, prompts: LazyPrompts, numbers: Any, rates: Any = None) -> None:
        self._prompts = prompts
        self._numbers = np.asarray(numbers, dtype=np.int64)
        self._rates = rates

    def __len__(self) -> int:
        return len(self._numbers)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a number."""
        prompt = self._prompts.prompt(int(self._numbers[number]))
        return prompt if self._rates is None else replace(prompt, pass_rate=self._rate(number))

    def value(self, number: int, name: Field) -> Any:
        """Return a field of the prompt of a number, without the others."""
        if name == "pass_rate" and self._rates is not None:
            return self._rate(number)
        return self._prompts.value(int(self._numbers[number]), name)

    def _rate(self, number: int) -> float | None:
        rate = float(self._rates[number])
        return None if np.isnan(rate) else rate

    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the tokens of each prompt."""
        return self._prompts.lengths()[self._numbers]


def chosen(prompts: Sequence[Prompt], numbers: Sequence[int]) -> Sequence[Prompt]:
    """Return the prompts of these numbers: a tuple of a tuple's, and otherwise none that are held."""
    if isinstance(prompts, LazyPrompts):
        return ChosenPrompts(prompts, numbers)
    return tuple(prompts[number] for number in numbers)


def rated(prompts: Sequence[Prompt], rates: Sequence[float | None]) -> Sequence[Prompt]:
    """Return the prompts with pass rates."""
    if isinstance(prompts, LazyPrompts):
        numbers = np.array([np.nan if rate is None else rate for rate in rates], dtype=np.float64)
        return ChosenPrompts(prompts, np.arange(len(prompts)), numbers)
    return tuple(replace(p, pass_rate=rate) for p, rate in zip(prompts, rates, strict=True))


def fields_of(prompts: Sequence[Prompt], name: Field) -> Iterator[Any]:
    """Return a field of every prompt."""
    if isinstance(prompts, LazyPrompts):
        return prompts.values(name)
    return (getattr(prompt, name) for prompt in prompts)


def lengths_of(prompts: Sequence[Prompt]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the tokens of each prompt."""
    if isinstance(prompts, LazyPrompts):
        return prompts.lengths()
    return np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)


def write_prompts(
    path: Path, chunks: Iterable[Sequence[Prompt]], summary: Callable[[], Mapping[str, Any]]
) -> None:
    """Write prompts, chunk by chunk, and then what the summary of them is, as JSON.

    An Arrow IPC file; messages and columns are JSON. NotJson where a value would come back as another one.
    """
    import pyarrow

    fields = [
        ("id", pyarrow.int64()),
        ("token_ids", pyarrow.list_(pyarrow.int32())),
        ("text", pyarrow.large_string()),
        ("messages", pyarrow.large_binary()),
        ("columns", pyarrow.large_binary()),
        ("opened", pyarrow.string()),
        ("task", pyarrow.string()),
        ("rendered_with", pyarrow.large_binary()),
    ]
    schema = pyarrow.schema(fields)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        for prompts in chunks:
            writer.write_batch(_batch(prompts, schema))
        writer.write_batch(_batch((), schema), custom_metadata={_SUMMARY: json.dumps(summary()).encode()})


def read_prompts(path: Path) -> tuple[StoredPrompts, dict[str, Any]]:
    """Return the prompts of such a file, and the summary; the file may be removed from then on."""
    import pyarrow

    # The batches keep the mapping as long as they are there.
    reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
    batches = [reader.get_batch(index) for index in range(reader.num_record_batches - 1)]
    _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    summary: dict[str, Any] = json.loads(metadata[_SUMMARY])
    return StoredPrompts(batches), summary


def _batch(prompts: Sequence[Prompt], schema: Any) -> RecordBatch:
    import pyarrow

    tokens = b"".join(array("i", prompt.token_ids).tobytes() for prompt in prompts)
    ends = np.array([0, *accumulate(len(prompt.token_ids) for prompt in prompts)], dtype=np.int32)
    columns = {
        "id": [p.id for p in prompts],
        "token_ids": pyarrow.ListArray.from_arrays(ends, np.frombuffer(tokens, dtype=np.int32)),
        "text": [p.text for p in prompts],
        "messages": [None if p.messages is None else _json([*map(dict, p.messages)]) for p in prompts],
        "columns": [_json(dict(p.columns)) for p in prompts],
        "opened": [p.opened for p in prompts],
        "task": [p.task for p in prompts],
        "rendered_with": [_json(dict(p.rendered_with)) for p in prompts],
    }
    return pyarrow.record_batch(columns, schema=schema)


def _json(value: Any) -> bytes:
    if not _is_exact(value):
        raise NotJson
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _is_exact(value: Any) -> bool:
    """Whether JSON gives back a value of the same types."""
    kind = type(value)
    if kind is list:
        return all(map(_is_exact, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_exact, value.values()))
    return kind in _JSON_TYPES


def _lengths(batch: RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.diff(batch.column("token_ids").offsets.to_numpy()).astype(np.int64)


def _tokens(value: Any) -> array[int]:
    tokens = array("i")
    tokens.frombytes(value.values.to_numpy().tobytes())
    return tokens


def _messages(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    return tuple(_parsed(value)) if value.is_valid else None


def _parsed(value: Any) -> Any:
    return json.loads(value.as_py().decode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    return value.as_py()


_DECODED: Mapping[str, Any] = {
    "id": _plain,
    "token_ids": _tokens,
    "text": _plain,
    "messages": _messages,
    "columns": _parsed,
    "opened": _plain,
    "task": _plain,
    "rendered_with": _parsed,
}
