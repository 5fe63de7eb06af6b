"""Images as JSON: at paths and URLs, in rows of the data, and with the bytes of others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from covey.data.image_records import NO_ROWS, ImageRows, media_of, media_records
from covey.data.images import PlacedImage, RowImage, places_of
from covey.data.stream import BLOCK, StreamRows
from covey.data.vision import HasImage, ImageAt
from covey.media.errors import MediaError
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.types import Medium
from support.vision import medium, picture

LIMITS = ImageLimits(4, 2, 2, 64, 4096)
FIRST, SECOND = picture((9, 99, 200)), picture((200, 9, 9))
ROWS: list[Mapping[str, Any]] = [
    {"prompt": "What?"},
    {"prompt": "<image><image>What?", "images": [FIRST, SECOND]},
]
PLACES: Mapping[str, HasImage] = {
    "path": PlacedImage(ImageSource(path="/pictures/a.png")),
    "url": PlacedImage(ImageSource(url="https://example.org/a.png")),
    "row": RowImage(ROWS, 1, 1, ("",)),
    "data": PlacedImage(ImageSource(data=FIRST)),
}


def at(place: HasImage) -> Medium:
    return replace(medium("9f3c", 2, 3), source=ImageAt(place, LIMITS))


@pytest.mark.parametrize("where", PLACES)
def test_an_image_is_as_it_was(where: str) -> None:
    given = (at(PLACES[where]), replace(at(PLACES[where]), key="other", extent=None))
    records = json.loads(json.dumps(media_records(given)))
    assert {*records[0]} & {"path", "url", "row", "data"} == {where}
    found = media_of(records, ImageRows(ROWS))
    assert found == given
    assert [one.source.limits for one in found] == [LIMITS] * 2
    assert found[0].source.place.image() == PLACES[where].image()


def test_rows_are_numbered_in_the_whole_data() -> None:
    """A table of a stream begins with a later row."""
    (place, second) = places_of([ImageSource(data=FIRST)] * 2, ROWS, 1, ("",), 1024)
    assert isinstance(place, RowImage) and isinstance(second, RowImage)
    assert [one["row"] for one in media_records([at(place), at(second)])] == [[1025, 0], [1025, 1]]


def test_what_cannot_be_found_is_named() -> None:
    records = media_records([at(PLACES["row"])])
    with pytest.raises(MediaError, match="row 2 of data that are not read here"):
        media_of(records, NO_ROWS)
    for rows, words in ((ROWS[:1], "no row 2"), ([ROWS[0]] * 2, "row 2 of the data has changed: it has 0")):
        (found,) = media_of(records, ImageRows(rows))
        with pytest.raises(MediaError, match=words):
            found.source.place.image()


def test_images_without_a_source_stay_so() -> None:
    (found,) = media_of(media_records([medium("cat", 1, 2)]))
    assert found == medium("cat", 1, 2) and found.source is None


def test_rows_of_a_stream_are_read_again() -> None:
    begun = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal begun
        begun += 1
        yield from ({"question ": number} for number in range(2 * BLOCK + 5))

    found = StreamRows(rows, {"question ": "query"})
    for number in (3, 0, BLOCK + 1, BLOCK, 2 * BLOCK + 4):
        assert found[number] == {"query": number}
    assert begun == 1
    assert found[1] == {"query": 1} and begun == 2
    with pytest.raises(IndexError):
        found[2 * BLOCK + 5]
    assert len(found) == 2 * BLOCK + 5
