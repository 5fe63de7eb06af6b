"""The prompts that rows hold: which column, rendered how, and what is left out."""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, Literal

from covey.data.errors import DataError as DataError
from covey.data.errors import TemplateError
from covey.data.forms import ReadRow
from covey.data.images import ImageRules, places_of
from covey.data.kept import KeptCheck
from covey.data.lazy_rows import identity_of
from covey.data.prompt import PROMPT_COLUMNS as PROMPT_COLUMNS
from covey.data.prompt import Rendered, opened, render
from covey.data.prompts import NO_ORIGIN, NotJson, lengths_of, read_prompts, write_prompts
from covey.data.shared_files import shared_file
from covey.data.sources import read_rows as read_rows
from covey.data.text import TextCodec
from covey.data.vision import RowMedia
from covey.texts import packed, tr, unpacked
from covey.types import Medium, Origin, Prompt

_CHUNK = 2_000
# Rows that are tokenised and written at a time: then a token takes 40 times what it does in a table.
_PART = 200
# Rows from which on a table is worth a file.
_SHARED_ROWS = 1_000
_NAMED_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Says how rows become prompts; `system` is the text itself (`system_text`). `tools` are those of the
    run; a row may name some of them. An environment may write the prompt, so that a row's is empty."""

    system: str | None = None
    apply_chat_template: bool = False
    truncation_strategy: Literal["delete", "left"] = "delete"
    task_column: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    has_environment: bool = False
    # Where relative paths of images start from.
    image_folders: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """Every usable prompt of the data, and how many rows were left out, by reason.

    Entries of a large file of rows are read from a file when they are asked for. The tokens of an entry are
    an array, 4 bytes a token instead of 36; `take` gives a tuple. Reasons are the
    keys of `plan/reasons.py`, as `no_prompt`, `too_long` or `role`. `left_out_rows` has the numbers of the
    first rows of each, and `details` what stands in the first of them, `roles` the role of
    a lost message there. `media_columns` are the
    columns with images, sound or video, `unread_columns` those with bytes, `unused_columns` those that a
    `prompt` string has no place for; `read_as` counts the rows that were read from other columns than covey's
    own form uses, by what was read, in words. `num_cut` are the prompts cut to `max_length`, `num_raw` those
    that no template touched.
    """

    entries: Sequence[Prompt]
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
        return int(lengths_of(self.entries).max(initial=0))

    def take(self, number: int, origin: Origin) -> Prompt:
        """The prompt at `number`, marked with where it is taken."""
        return taken(self.entries[number], origin)


def taken(prompt: Prompt, origin: Origin) -> Prompt:
    """A prompt of a table, marked with where it is taken, its tokens as a tuple."""
    return replace(prompt, token_ids=tuple(prompt.token_ids), origin=origin)


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

    Where 1,000 rows or more come from files, the prompts lie in a file that the processes of this machine
    share: one of them makes it, and calls `progress`. Otherwise the table holds them.
    """
    make = functools.partial(_TableBuilder, codec, max_length, options, first_id)
    # Files of images may have changed since a table was written.
    may_share = codec.vision is None and len(rows) >= _SHARED_ROWS
    if may_share and (of_rows := identity_of(rows)) is not None:
        asked = [_made_by(), of_rows, codec.identity(), max_length, asdict(options), first_id]
        name = hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
        table = _shared(f"{name}.arrow", make, rows, progress)
        if table is not None:
            return table
    builder = make()
    entries = [prompt for chunk in builder.chunks(rows, progress) for prompt in chunk]
    return PromptTable(entries=tuple(entries), **builder.facts())


def _shared(
    name: str,
    make: Callable[[], _TableBuilder],
    rows: Sequence[Mapping[str, Any]],
    progress: Callable[[int, int], None] | None,
) -> PromptTable | None:
    """Return the table of a file that the processes of this machine share; None where there can be none.

    A damaged file is removed and written again.
    """

    def write(path: Path) -> None:
        builder = make()
        write_prompts(path, builder.chunks(rows, progress), lambda: _packed(builder.facts()))

    try:
        for _ in range(2):
            path = shared_file(name, write)
            if path is None:
                break
            try:
                entries, facts = read_prompts(path)
            except ValueError:
                path.unlink(missing_ok=True)
            else:
                return PromptTable(entries=entries, **_unpacked(facts))
    except (NotJson, OSError):
        pass
    return None


@functools.cache
def _made_by() -> list[str]:
    """Return what a file of prompts depends on beside the options: the digest of the code, and versions."""
    code = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return [code.hexdigest(), *(metadata.version(name) for name in ("jinja2", "tokenizers", "pyarrow"))]


class _TableBuilder:
    """The parts of a `PromptTable` but for its entries, collected row by row."""

    def __init__(
        self, codec: TextCodec, max_length: int | None, options: PromptOptions, first_id: int
    ) -> None:
        self._codec = codec
        self._check = KeptCheck(codec)
        self._images = None if codec.vision is None else RowMedia(codec.vision)
        self._max_length = max_length
        self._options = options
        self._first_id = first_id
        self._columns: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._left_out_rows: dict[str, list[int]] = {}
        self._details: dict[str, str] = {}
        self._roles: dict[str, str] = {}
        self._media: set[str] = set()
        self._unread: set[str] = set()
        self._unused: set[str] = set()
        self._read_as: Counter[str] = Counter()
        self._longest = self._num_cut = self._num_raw = 0

    def chunks(
        self, rows: Sequence[Mapping[str, Any]], progress: Callable[[int, int], None] | None
    ) -> Iterator[list[Prompt]]:
        """The usable prompts, those of 200 rows at a time."""
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            for part in range(0, len(chunk), _PART):
                numbers = range(start + part, min(start + part + _PART, len(rows)))
                yield [*self._prompts(chunk[part : part + _PART], numbers, rows)]
            if progress is not None:
                progress(start + len(chunk), len(rows))

    def _prompts(
        self, rows: Sequence[Mapping[str, Any]], numbers: range, table: Sequence[Mapping[str, Any]]
    ) -> Iterator[Prompt]:
        """The usable prompts of rows, which are those of these numbers in the table."""
        for row in rows:
            self._columns.update(row)
        first = self._first_id + numbers.start
        rendered = [
            _render(row, number, self._codec, self._check, self._options)
            for number, row in enumerate(rows, start=first)
        ]
        seen = self._with_media(rendered, numbers, table)
        encoded = _encode([found for found, _ in seen], self._codec)
        for number, (found, media), ids in zip(count(first), seen, encoded, strict=False):
            if media:
                assert self._codec.vision is not None
                ids = self._codec.vision.expanded(ids, media)
            prompt = self._prompt(number, found, ids, media)
            if prompt is not None:
                yield prompt

    def _with_media(
        self, rendered: Sequence[Rendered], numbers: range, table: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Rendered, tuple[Medium, ...]]]:
        """Prompts with their images; one that has no text where an image cannot be used."""
        if self._images is None:
            return [(found, ()) for found in rendered]
        folders, first = self._options.image_folders, self._first_id
        places = [
            () if found.reason else places_of(found.row.images, table, number, folders, first)
            for found, number in zip(rendered, numbers, strict=True)
        ]
        return [
            (found, made)
            if isinstance(made, tuple)
            else (Rendered(row=found.row, reason="image", detail=str(made)), ())
            for found, made in zip(rendered, self._images.media(places), strict=True)
        ]

    def _prompt(
        self, number: int, rendered: Rendered, ids: tuple[int, ...], media: tuple[Medium, ...] = ()
    ) -> Prompt | None:
        """A prompt, cut where that is asked for; None for one that is left out, with its reason."""
        self._media.update(rendered.row.media)
        self._unread.update(rendered.row.unread)
        self._longest = max(self._longest, len(ids))
        most = self._max_length
        is_long = most is not None and len(ids) > most
        # An image is not cut.
        is_cut = is_long and self._options.truncation_strategy == "left" and not media
        reason = rendered.reason or ("too_long" if is_long and not is_cut else "" if ids else "no_prompt")
        if reason:
            self._leave_out(reason, number, rendered)
            return None
        self._unused.update(rendered.row.unused)
        self._read_as.update(rendered.row.read_as)
        text = rendered.text
        if is_cut:
            ids = ids[len(ids) - (most or 0) :]
            text = self._codec.written_out(ids)
        self._num_cut += is_cut
        self._num_raw += rendered.messages is None
        return Prompt(
            id=number,
            messages=rendered.messages,
            text=text,
            token_ids=array("i", ids),
            columns=rendered.row.columns,
            origin=NO_ORIGIN,
            opened=opened(rendered),
            task=task_of(rendered.row.columns, self._options.task_column),
            rendered_with=_beside(rendered.row),
            media=media,
        )

    def _leave_out(self, reason: str, number: int, rendered: Rendered) -> None:
        self._left_out[reason] += 1
        named = self._left_out_rows.setdefault(reason, [])
        if len(named) < _NAMED_ROWS:
            named.append(number)
        self._details.setdefault(reason, rendered.detail)
        self._roles.setdefault(reason, rendered.role)

    def facts(self) -> dict[str, Any]:
        """The fields of the table."""
        return {
            "left_out": dict(self._left_out),
            "left_out_rows": {reason: tuple(rows) for reason, rows in self._left_out_rows.items()},
            "columns": tuple(sorted(self._columns)),
            "longest_in_data": self._longest,
            "details": self._details,
            "roles": self._roles,
            "media_columns": tuple(sorted(self._media)),
            "unread_columns": tuple(sorted(self._unread)),
            "unused_columns": tuple(sorted(self._unused)),
            "read_as": self._read_as,
            "num_cut": self._num_cut,
            "num_raw": self._num_raw,
        }


def _beside(row: ReadRow) -> dict[str, Any]:
    """Return what the template was given of a row beside its messages."""
    given = {"tools": [*map(dict, row.tools)], "arguments": dict(row.template_kwargs or {})}
    return {name: value for name, value in given.items() if value}


def _packed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table as JSON has them."""
    details = {reason: packed(text) for reason, text in facts["details"].items()}
    return {**facts, "details": details, "read_as": [[packed(t), n] for t, n in facts["read_as"].items()]}


def _unpacked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `_packed` made this of."""
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    rows = {reason: tuple(numbers) for reason, numbers in facts["left_out_rows"].items()}
    details = {reason: unpacked(text) for reason, text in facts["details"].items()}
    read_as = {unpacked(text): count for text, count in facts["read_as"]}
    return {**found, "left_out_rows": rows, "details": details, "read_as": read_as}


def task_of(columns: Mapping[str, Any], column: str | None) -> str:
    """The task that a row names, a word or a number; "" where it names none."""
    value = None if column is None else columns.get(column)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _render(
    row: Mapping[str, Any], number: int, codec: TextCodec, check: KeptCheck, options: PromptOptions
) -> Rendered:
    try:
        return render(
            row,
            codec,
            check,
            system=options.system,
            is_raw=not options.apply_chat_template,
            tools=options.tools,
            may_be_empty=options.has_environment,
            images=rules_of(codec, options),
        )
    except TemplateError as error:
        words = tr("row {number}: {error}", number=number + 1, error=error)
        raise TemplateError(
            words if codec.chat_template else str(error), kind=error.kind, names_option=error.names_option
        ) from error


def rules_of(codec: TextCodec, options: PromptOptions) -> ImageRules | None:
    """Return how images of rows are read; None for a model that sees none."""
    if codec.vision is None:
        return None
    return ImageRules(folders=options.image_folders, refused=codec.vision.refused)


def _encode(rendered: Sequence[Rendered], codec: TextCodec) -> list[tuple[int, ...]]:
    """Token ids; only prompts that no template made get the tokenizer's own special tokens."""
    ids = codec.encode([r.text for r in rendered])
    if codec.prefix_ids:
        raw = [n for n, r in enumerate(rendered) if r.messages is None and r.text]
        whole = codec.encode([rendered[n].text for n in raw], add_special_tokens=True)
        for n, with_prefix in zip(raw, whole, strict=True):
            ids[n] = with_prefix
    return ids
