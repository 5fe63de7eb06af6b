"""Rows of a data set, and the prompts they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.data.text import TextCodec
from covey.errors import CoveyError
from covey.types import Draw, Prompt

# Where a prompt is looked for, in this order; every other column goes to the rewards.
PROMPT_COLUMNS = ("prompt", "messages", "query", "question", "problem")

_FORMATS = {".json": "json", ".csv": "csv", ".parquet": "parquet"}


class DataError(CoveyError, ValueError):
    """A data file that cannot be read, with the line where it stops making sense."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .json, .csv or .parquet file, as dicts.

    JSON lines are read directly; the other formats through `datasets`.
    """
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix not in _FORMATS:
        known = ", ".join([".jsonl", *_FORMATS])
        raise DataError(f"{path} is none of the formats that this version reads: {known}")
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{path} could not be read: {error}") from error
    return [dict(row) for row in loaded]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: {error.msg}") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: the bytes are no UTF-8 text") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a row is a JSON object, not {type(row).__name__}")
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """Every usable prompt of the data, and how many rows were left out, by reason."""

    entries: tuple[Prompt, ...]
    left_out: Mapping[str, int]
    columns: tuple[str, ...]
    longest_in_data: int

    @property
    def longest(self) -> int:
        """Tokens of the longest usable prompt."""
        return max((len(p.token_ids) for p in self.entries), default=0)

    def take(self, number: int, draw: Draw) -> Prompt:
        """The prompt at `number`, marked with the draw it is taken for."""
        p = self.entries[number]
        return Prompt(
            id=p.id, messages=p.messages, text=p.text, token_ids=p.token_ids, columns=p.columns, draw=draw
        )


_UNDRAWN = Draw(epoch=-1, rollout=-1)


def prompt_table(
    rows: Sequence[Mapping[str, Any]], codec: TextCodec, *, max_length: int | None
) -> PromptTable:
    """Render and tokenise every row once.

    A `prompt` string goes to the model as it is; every other form goes through the chat template. Rows
    without a prompt, and prompts longer than `max_length` tokens, are left out and counted.
    """
    rendered = [_render(row, codec) for row in rows]
    token_ids = codec.encode([r.text for r in rendered])
    entries: list[Prompt] = []
    left_out: dict[str, int] = {}
    for number, (r, ids) in enumerate(zip(rendered, token_ids, strict=True)):
        if not ids:
            left_out["no_prompt"] = left_out.get("no_prompt", 0) + 1
        elif max_length is not None and len(ids) > max_length:
            left_out["too_long"] = left_out.get("too_long", 0) + 1
        else:
            entries.append(
                Prompt(
                    id=number,
                    messages=r.messages,
                    text=r.text,
                    token_ids=ids,
                    columns=r.columns,
                    draw=_UNDRAWN,
                )
            )
    return PromptTable(
        entries=tuple(entries),
        left_out=left_out,
        columns=tuple(sorted({name for row in rows for name in row})),
        longest_in_data=max((len(ids) for ids in token_ids), default=0),
    )


@dataclass(frozen=True, slots=True)
class _Rendered:
    messages: tuple[Mapping[str, Any], ...] | None
    text: str
    columns: Mapping[str, Any]


def _render(row: Mapping[str, Any], codec: TextCodec) -> _Rendered:
    """The prompt text of a row; empty where it has none."""
    column = next((c for c in PROMPT_COLUMNS if row.get(c)), None)
    if column is None:
        return _Rendered(None, "", row)
    value = row[column]
    columns = {k: v for k, v in row.items() if k != column}
    if column == "prompt" and isinstance(value, str):
        return _Rendered(None, value, columns)
    messages = _messages(value)
    if not messages:
        return _Rendered(None, "", columns)
    return _Rendered(messages, codec.render(messages), columns)


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    messages = tuple(dict(m) for m in value)
    # ms-swift's data ends with the gold assistant turn; the policy writes that turn itself.
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    return messages
