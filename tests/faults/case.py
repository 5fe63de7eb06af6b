"""What a case of bad input is, and the files that the cases lay out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from covey.quickstart.task import MODEL_DIR


def _nothing(*_: Any) -> None:
    """No set-up beyond the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command that is refused: its words behind `covey`, files by path, further set-up of the directory,
    and what the machine is made to say of itself."""

    name: str
    words: str
    files: Mapping[str, str] = field(default_factory=dict)
    make: Callable[[Path], None] = _nothing
    edge: Callable[[pytest.MonkeyPatch, Path], None] = _nothing


def words(
    rest: str = "", *, model: str = "quickstart", dataset: str = "sums.jsonl", reward: str = "accuracy"
) -> str:
    """A command that trains, but for what is given; every case has a file sums.jsonl."""
    inputs = f"train --model {model} --dataset {dataset} --reward_funcs {reward}"
    return f"{inputs} --max_completion_length 16 --learning_rate 1e-4 {rest}".strip()


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as the text of a file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def sums(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows with a question and its answer."""
    return [{"question": f"What is {n}+1?", "solution": str(n + 1), **columns} for n in range(count)]


SUMS = jsonl(sums(64))


def model(directory: Path, *, without: tuple[str, ...] = (), **config: Any) -> Path:
    """The built-in model in a directory of its own, with another config.json; None takes a key away."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in MODEL_DIR.iterdir():
        if file.name not in without:
            shutil.copy(file, directory / file.name)
    path = directory / "config.json"
    if path.is_file():
        changed = {**json.loads(path.read_text(encoding="utf-8")), **config}
        path.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}), encoding="utf-8")
    return directory


def changed_model(**config: Any) -> Callable[[Path], None]:
    """A set-up: the directory `model` with another config.json."""
    return lambda here: void(model(here / "model", **config))


def void(_: object) -> None:
    """Take a value and give none, so that a lambda is a set-up."""
