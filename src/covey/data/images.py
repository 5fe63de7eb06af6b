"""Images of rows: which stand in a prompt, where, and what they are read from.

While a row is read, a mark stands in the text of its messages for each image. Data writes it as `<image>`, as
a block of a message, or nowhere: then the images stand in front of the first question.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.data.errors import RowFault
from covey.data.messages import MARK, Message
from covey.media.errors import MediaError
from covey.media.source import ImageSource, sources_of
from covey.texts import tr

WRITTEN = "<image>"
"""The text that stands for an image in messages; ms-swift uses the same."""

IMAGE_COLUMNS = ("images", "image")
# A longer text is the image itself as base64.
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How images of rows are read: relative paths start from one of the `folders`, and no text may hold a
    token of `refused`."""

    folders: tuple[str, ...] = ("",)
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image that lies in a file or on the web."""

    source: ImageSource

    def image(self) -> ImageSource:
        """Return it."""
        return self.source


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """An image whose bytes lie in a row of the data: the row is read again for them. It is number `place` of
    the images of row `number` of the `table`, whose first row is number `first` of the data."""

    table: Sequence[Mapping[str, Any]]
    number: int
    place: int
    folders: tuple[str, ...]
    first: int = 0

    def image(self) -> ImageSource:
        """Return it. Raises MediaError where the row has no such image."""
        from covey.data.forms import read_row

        number = self.first + self.number + 1
        try:
            row = self.table[self.number]
        except IndexError as error:
            raise MediaError(tr("the data have no row {number}", number=number)) from error
        rules = ImageRules(folders=self.folders)
        images = read_row(row, system=None, is_raw=False, images=rules).images
        if self.place >= len(images):
            words = tr(
                "row {number} of the data has changed: it has {num} images", number=number, num=len(images)
            )
            raise MediaError(words)
        return images[self.place]


def places_of(
    sources: Sequence[ImageSource],
    table: Sequence[Mapping[str, Any]],
    number: int,
    folders: tuple[str, ...],
    first: int = 0,
) -> list[PlacedImage | RowImage]:
    """Return where the images of row `number` of a table are, whose first row is number `first` of the data;
    the bytes of none are kept."""
    return [
        PlacedImage(source) if source.data is None else RowImage(table, number, place, folders, first)
        for place, source in enumerate(sources)
    ]


def read_images(value: Any, rules: ImageRules) -> list[ImageSource]:
    """Return the images of a value of a row. RowFault("image") says what is none."""
    try:
        found = [sources_of(value, Path(folder)) for folder in rules.folders]
    except MediaError as error:
        raise RowFault("image", str(error)) from error
    there = (own for own in found if all(one.path is None or os.path.exists(one.path) for one in own))
    return next(there, found[0])


def names_files(value: Any) -> bool:
    """Return whether a value of a column of images only says where they are, and holds none of them."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_NAME and not value.startswith("data:")
    if isinstance(value, Mapping):
        return all(map(names_files, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(names_files, value)))


def in_messages(
    messages: Sequence[dict[str, Any]], own: Sequence[Any], column: Sequence[ImageSource], rules: ImageRules
) -> tuple[ImageSource, ...]:
    """Return the images of messages, in the order of their marks. Where no mark is there for those of the
    `column`, marks for them are put in front of the first question.

    `own` has what each mark names itself, None where it stands for one of the column. RowFault("image") where
    there are more marks than images, or more images than marks; "placeholder" for a text that holds a token
    which stands for an image.
    """
    for message in messages:
        text = message["content"] or ""
        written = next((token for token in rules.refused if token in text), None)
        if written is not None:
            raise RowFault("placeholder", written)
    num_marks = sum((message["content"] or "").count(MARK) for message in messages)
    named = [None if one is None else read_images(one, rules) for one in own[:num_marks]]
    num_open = sum(one is None for one in named)
    if column and not num_open:
        first = next((m for m in messages if m["role"] == "user"), None)
        if first is None:
            raise RowFault("image", tr("images, but no question"))
        before = sum((m["content"] or "").count(MARK) for m in messages[: messages.index(first)])
        first["content"] = MARK * len(column) + (first["content"] or "")
        named[before:before] = [None] * len(column)
        num_open = len(column)
    if num_open != len(column):
        raise RowFault(
            "image",
            tr("images: {num}, places for them in the text: {num_open}", num_open=num_open, num=len(column)),
        )
    waiting = iter(column)
    found: list[ImageSource] = []
    for one in named:
        if one is not None and len(one) != 1:
            raise RowFault("image", tr("a block for one image holds {num}", num=len(one)))
        found.append(next(waiting) if one is None else one[0])
    return tuple(found)


def with_blocks(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages as templates take them: a text with marks is a list of blocks."""
    return tuple(
        {**message, "content": blocks_of(message["content"])}
        if MARK in (message.get("content") or "")
        else message
        for message in messages
    )


def blocks_of(text: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a text with marks."""
    first, *others = text.split(MARK)
    blocks: list[Mapping[str, Any]] = [{"type": "text", "text": first}] if first else []
    for part in others:
        blocks.append({"type": "image"})
        if part:
            blocks.append({"type": "text", "text": part})
    return blocks
