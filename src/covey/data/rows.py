"""The prompts that rows hold: which column, rendered how, and what is left out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from covey.data.errors import DataError as DataError
from covey.data.errors import TemplateError
from covey.data.kept import KeptCheck
from covey.data.prompt import PROMPT_COLUMNS as PROMPT_COLUMNS
from covey.data.prompt import Rendered, opened, render
from covey.data.sources import read_rows as read_rows
from covey.data.text import TextCodec
from covey.texts import tr
from covey.types import Origin, Prompt

_CHUNK = 2_000
_NAMED_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts; `system` is the text itself (`system_text`)."""

    system: str | None = None
    apply_chat_template: bool = False
    truncation_strategy: Literal["delete", "left"] = "delete"
    task_column: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """Every usable prompt of the data, and how many rows were left out, by reason.

    The tokens of an entry are an array, 4 bytes a token instead of 36; `take` gives a tuple. Reasons are the
    keys of `plan/reasons.py`, as `no_prompt`, `too_long` or `role`. `left_out_rows` has the numbers of the
    first rows of each, and `details` what stands in the first of them, `roles` the role of
    a lost message there. `media_columns` are the
    columns with images, sound or video, `unread_columns` those with bytes, `unused_columns` those that a
    `prompt` string has no place for; `read_as` counts the rows that were read from other columns than covey's
    own form uses, by what was read, in words. `num_cut` are the prompts cut to `max_length`, `num_raw` those
    that no template touched.
    """

    entries: tuple[Prompt, ...]
    left_out: Mapping[str, int]
    columns: tuple[str, ...]
    longest_in_data: int
    left_out_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    media_columns: tuple[str, ...] = ()
    unread_columns: tuple[str, ...] = ()
    unused_columns: tuple[str, ...] = ()
    read_as: Mapping[str, int] = field(default_factory=dict)
    num_cut: int = 0
    num_raw: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest usable prompt."""
        return max((len(p.token_ids) for p in self.entries), default=0)

    def take(self, number: int, origin: Origin) -> Prompt:
        """The prompt at `number`, marked with where it is taken."""
        return taken(self.entries[number], origin)


def taken(prompt: Prompt, origin: Origin) -> Prompt:
    """A prompt of a table, marked with where it is taken, its tokens as a tuple."""
    return replace(prompt, token_ids=tuple(prompt.token_ids), origin=origin)


_NO_ORIGIN = Origin(epoch=-1, rollout=-1)
_PLAIN = PromptOptions()


def prompt_table(
    rows: Sequence[Mapping[str, Any]],
    codec: TextCodec,
    *,
    max_length: int | None,
    options: PromptOptions = _PLAIN,
    first_id: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PromptTable:
    """Render and tokenise every row once.

    A `prompt` string goes to the model as it is, after the tokenizer's own BOS; every other form goes through
    the chat template. Rows without a prompt, and prompts longer than `max_length` tokens, are left out and
    counted. `progress` is called with (rows done, rows) every 2,000 rows; the first row's number is
    `first_id`.
    """
    table, check = _TableBuilder(), KeptCheck(codec)
    columns: dict[str, None] = {}
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        for row in chunk:
            columns.update(dict.fromkeys(row))
        rendered = [_render(row, first_id + start + n, codec, check, options) for n, row in enumerate(chunk)]
        for n, (r, ids) in enumerate(zip(rendered, _encode(rendered, codec), strict=True)):
            table.add(first_id + start + n, r, ids, codec, max_length, options)
        if progress is not None:
            progress(start + len(chunk), len(rows))
    return PromptTable(
        entries=tuple(table.entries),
        left_out={reason: len(numbers) for reason, numbers in table.left_out.items()},
        left_out_rows={reason: tuple(numbers[:_NAMED_ROWS]) for reason, numbers in table.left_out.items()},
        columns=tuple(sorted(columns)),
        longest_in_data=table.longest,
        details=table.details,
        roles=table.roles,
        media_columns=tuple(sorted(table.media)),
        unread_columns=tuple(sorted(table.unread)),
        unused_columns=tuple(sorted(table.unused)),
        read_as=table.read_as,
        num_cut=table.num_cut,
        num_raw=table.num_raw,
    )


class _TableBuilder:
    """The parts of a `PromptTable`, collected row by row."""

    def __init__(self) -> None:
        self.entries: list[Prompt] = []
        self.left_out: dict[str, list[int]] = {}
        self.details: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.media: set[str] = set()
        self.unread: set[str] = set()
        self.unused: set[str] = set()
        self.read_as: Counter[str] = Counter()
        self.longest = self.num_cut = self.num_raw = 0

    def add(
        self,
        number: int,
        rendered: Rendered,
        ids: tuple[int, ...],
        codec: TextCodec,
        max_length: int | None,
        options: PromptOptions,
    ) -> None:
        """Keep a prompt, cut, or leave it out with its reason."""
        self.media.update(rendered.row.media)
        self.unread.update(rendered.row.unread)
        self.longest = max(self.longest, len(ids))
        is_long = max_length is not None and len(ids) > max_length
        is_cut = is_long and options.truncation_strategy == "left"
        reason = rendered.reason or ("too_long" if is_long and not is_cut else "" if ids else "no_prompt")
        if reason:
            self.left_out.setdefault(reason, []).append(number)
            self.details.setdefault(reason, rendered.detail)
            self.roles.setdefault(reason, rendered.role)
            return
        self.unused.update(rendered.row.unused)
        self.read_as.update(rendered.row.read_as)
        text = rendered.text
        if is_cut:
            ids = ids[len(ids) - (max_length or 0) :]
            text = codec.written_out(ids)
        self.num_cut += is_cut
        self.num_raw += rendered.messages is None
        self.entries.append(
            Prompt(
                id=number,
                messages=rendered.messages,
                text=text,
                token_ids=array("i", ids),
                columns=rendered.row.columns,
                origin=_NO_ORIGIN,
                opened=opened(rendered),
                task=task_of(rendered.row.columns, options.task_column),
            )
        )


def task_of(columns: Mapping[str, Any], column: str | None) -> str:
    """The task that a row names, a word or a number; "" where it names none."""
    value = None if column is None else columns.get(column)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _render(
    row: Mapping[str, Any], number: int, codec: TextCodec, check: KeptCheck, options: PromptOptions
) -> Rendered:
    try:
        return render(row, codec, check, system=options.system, is_raw=not options.apply_chat_template)
    except TemplateError as error:
        words = tr("row {number}: {error}", number=number + 1, error=error)
        raise TemplateError(
            words if codec.chat_template else str(error), kind=error.kind, names_option=error.names_option
        ) from error


def _encode(rendered: Sequence[Rendered], codec: TextCodec) -> list[tuple[int, ...]]:
    """Token ids; only prompts that no template made get the tokenizer's own special tokens."""
    ids = codec.encode([r.text for r in rendered])
    if codec.prefix_ids:
        raw = [n for n, r in enumerate(rendered) if r.messages is None and r.text]
        whole = codec.encode([rendered[n].text for n in raw], add_special_tokens=True)
        for n, with_prefix in zip(raw, whole, strict=True):
            ids[n] = with_prefix
    return ids
