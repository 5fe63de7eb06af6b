"""Images as JSON records: what is sent to another rank, kept in a checkpoint, and replayed.

A record says where the image is: at a path or a URL, or in a row of the data, which is read again. The bytes
of others, such as those that a tool returned, are within it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.data.images import PlacedImage, RowImage
from covey.data.vision import HasImage, ImageAt
from covey.media.errors import MediaError
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.texts import tr
from covey.types import Medium

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of the data, in which images lie; None where no data are read. Relative paths in them start
    from one of the `folders`."""

    table: Sequence[Mapping[str, Any]] | None = None
    folders: tuple[str, ...] = ("",)

    def image(self, number: int, place: int) -> RowImage:
        """Return an image of a row. MediaError where there are no data."""
        if self.table is None:
            words = tr(
                "an image lies in row {number} of data that are not read here: name them as --dataset",
                number=number + 1,
            )
            raise MediaError(words)
        return RowImage(self.table, number, place, self.folders)


NO_ROWS = ImageRows()
"""No data."""


def media_records(media: Iterable[Medium]) -> list[Record]:
    """Return images as JSON: `[{"key": "9f3c…", "token_id": 151655, "num_tokens": 64, "grid": [1, 16, 16],
    "extent": [1, 8, 8], "limits": [14, 2, 2, 3136, 1003520], "path": "/data/cats/1.jpg"}]`.

    In place of the path stands a `url`, in `row` the number of a row and of the image in it, or in `data` the
    bytes in base64.
    """
    return [{**described(medium), **_where(medium.source)} for medium in media]


def media_of(records: Iterable[Mapping[str, Any]], rows: ImageRows = NO_ROWS) -> tuple[Medium, ...]:
    """Return the images of records. MediaError where one lies in a row, and no rows are there."""
    return tuple(medium_of(record, _place(record, rows)) for record in records)


def described(medium: Medium) -> Record:
    """Return the record of an image without where it is."""
    limits = None if medium.source is None else medium.source.limits.numbers
    return {
        "key": medium.key,
        "token_id": medium.token_id,
        "num_tokens": medium.num_tokens,
        "grid": list(medium.grid),
        "extent": None if medium.extent is None else list(medium.extent),
        "limits": limits,
    }


def medium_of(record: Mapping[str, Any], place: HasImage | None) -> Medium:
    """Return the image of a record, which is at this place; None: nobody says."""
    time, down, across = record["grid"]
    extent = record["extent"]
    return Medium(
        key=record["key"],
        token_id=record["token_id"],
        num_tokens=record["num_tokens"],
        grid=(time, down, across),
        extent=None if extent is None else (extent[0], extent[1], extent[2]),
        source=None if place is None else ImageAt(place, ImageLimits(*record["limits"])),
    )


def _where(at: ImageAt | None) -> Record:
    if at is None:
        return {}
    if isinstance(at.place, RowImage):
        return {"row": [at.place.first + at.place.number, at.place.place]}
    source = at.place.image()
    if source.data is not None:
        return {"data": b64encode(source.data).decode()}
    return {"url": source.url} if source.path is None else {"path": source.path}


def _place(record: Mapping[str, Any], rows: ImageRows) -> HasImage | None:
    if "row" in record:
        return rows.image(*record["row"])
    if "data" in record:
        return PlacedImage(ImageSource(data=b64decode(record["data"])))
    if "path" in record or "url" in record:
        return PlacedImage(ImageSource(path=record.get("path"), url=record.get("url")))
    return None
