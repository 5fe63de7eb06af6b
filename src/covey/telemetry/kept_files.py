"""The tensor file beside the records of a rollout, with the kept sets of its sequences.

`rollout-000012.kept.safetensors` holds `counts` and `words` of all sequences of `rollout-000012.jsonl` that
have sets, one behind the other in the order of the records, with their vocabulary in its metadata. In a
record as it is read or written a sequence has its sets under "kept"; in the file of records it has their
checksum under "kept_checksum".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.telemetry.jsonl import write_bytes
from covey.texts import tr
from covey.types import KeptSets
from covey.types.arrays import ints
from covey.weight_files import DamagedFileError, read_file

SUFFIX = ".kept.safetensors"

Record = Mapping[str, Any]


def kept_path(records: Path) -> Path:
    """Return where the kept sets of a file of records are, which may be compressed."""
    return records.with_name(records.name.partition(".jsonl")[0] + SUFFIX)


def without_sets(records: Iterable[Record]) -> tuple[list[dict[str, Any]], KeptSets | None]:
    """Return records as their file has them, and their kept sets joined; None where no sequence has some."""
    sets: list[KeptSets] = []

    def told(sequence: Record) -> dict[str, Any]:
        kept = sequence.get("kept")
        if kept is None:
            return dict(sequence)
        sets.append(kept)
        others = {name: value for name, value in sequence.items() if name != "kept"}
        return {**others, "kept_checksum": kept.checksum}

    plain = []
    for record in records:
        own = told(record)
        if "sequences" in own:
            own["sequences"] = [told(sequence) for sequence in own["sequences"]]
        plain.append(own)
    return plain, KeptSets.joined(sets) if sets else None


def write_sets(path: Path, kept: KeptSets) -> int:
    """Write the kept sets that go with the records at `path`, at once, and return the bytes of their file."""
    from safetensors.numpy import save

    content = save({"counts": kept.counts, "words": kept.words}, {"vocab": str(kept.vocab)})
    write_bytes(kept_path(path), content)
    return len(content)


def add_sets(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Put the kept sets that go with the records at `path` into these records, which were read from there.

    The sets stay in their file and are read where they are used. Raises CoveyError where the file is missing
    or damaged, or has not exactly the sets of these records.
    """
    sequences = [s for record in records for s in _sequences(record) if "kept_checksum" in s]
    if not sequences:
        return
    file = kept_path(path)
    if not isfile(file):
        raise CoveyError(tr("{path}, which holds the tokens that filters kept, is missing", path=file))
    try:
        kept = _mapped(file)
    except (OSError, DamagedFileError) as error:
        raise CoveyError(tr("{path} cannot be read: {error}", path=file, error=error)) from error
    sizes = [sum(sequence["trained_mask"]) for sequence in sequences]
    if sum(sizes) != len(kept):
        raise CoveyError(
            tr(
                "{path} has what filters kept for {num} tokens, but its records have {num_tokens} such "
                "tokens",
                path=file,
                num=len(kept),
                num_tokens=sum(sizes),
            )
        )
    for sequence, own in zip(sequences, kept.split(sizes), strict=True):
        _check(sequence, own, file)
        sequence["kept"] = own
        del sequence["kept_checksum"]


def _sequences(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield record
    yield from record.get("sequences", ())


def _mapped(file: Path) -> KeptSets:
    """The sets of a file, as views of it. Raises DamagedFileError where it is not whole."""
    import numpy as np

    tensors, metadata = read_file(file)
    vocab = metadata.get("vocab", "")
    if {name: t.dtype for name, t in tensors.items()} != {"counts": "I32", "words": "I32"} or not (
        vocab.isdecimal() and int(vocab)
    ):
        raise DamagedFileError(tr("{name} is not a file of what filters kept", name=file.name))

    def mapped(name: str) -> Any:
        found = tensors[name]
        num = (found.end - found.start) // 4
        return np.memmap(file, "<i4", "r", found.start, (num,)) if num else ints(())

    counts = mapped("counts")
    if (counts < 0).any():
        raise DamagedFileError(tr("{name} is not a file of what filters kept", name=file.name))
    try:
        return KeptSets(vocab=int(vocab), counts=counts, words=mapped("words"))
    except ValueError as error:
        raise DamagedFileError(str(error)) from error


def _check(sequence: Record, kept: KeptSets, file: Path) -> None:
    """Raise CoveyError where these are not the sets that the tokens of a sequence were drawn from."""
    drawn = [
        token
        for token, is_trained in zip(sequence["completion_ids"], sequence["trained_mask"], strict=True)
        if is_trained
    ]
    if lacking := kept.lacks(drawn):
        raise CoveyError(
            tr(
                "{path} does not list token {token} among those that filters kept, though it was sampled",
                path=file,
                token=drawn[lacking[0]],
            )
        )
    if kept.checksum != sequence["kept_checksum"]:
        raise CoveyError(tr("{path} was written for other records: its checksum differs", path=file))
