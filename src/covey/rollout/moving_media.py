"""The images of rows that go to another rank, as bytes.

Every rank knows the images of the prompts. Those that a tool or an environment has added are on the owner of
the row alone: what they are, and the bytes of those that lie in no file, are sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.image_records import described, media_of, medium_of
from covey.data.images import PlacedImage
from covey.media.source import ImageSource
from covey.types import Medium

Media = tuple[Medium, ...]


def packed_media(media: Mapping[int, Media], known: Sequence[Media]) -> tuple[bytes, bytes]:
    """Return what another rank is told of the images of rows, by number, and the bytes of files behind each
    other; `known` are the images of their prompts. Of a row that has these alone it is told nothing.

    `{"7": [0, {"key": "9f3c…", …, "num_bytes": 512}]}`, as JSON: row 7 has the first image of its prompt, and
    one of 512 bytes.
    """
    told: dict[int, list[Any]] = {}
    files: list[bytes] = []
    for number, own in media.items():
        if own != known[number]:
            places = {medium: place for place, medium in enumerate(known[number])}
            told[number] = [places[one] if one in places else _told(one, files) for one in own]
    return json.dumps(told).encode() if told else b"", b"".join(files)


def unpacked_media(words: bytes, files: bytes, known: Sequence[Media]) -> dict[int, Media]:
    """Return the images of the rows that are told of."""
    told: dict[str, list[Any]] = json.loads(words) if words else {}
    found: dict[int, Media] = {}
    begin = 0
    for number, entries in told.items():
        media: list[Medium] = []
        for entry in entries:
            if isinstance(entry, int):
                media.append(known[int(number)][entry])
            elif "num_bytes" in entry:
                end = begin + entry["num_bytes"]
                media.append(medium_of(entry, PlacedImage(ImageSource(data=files[begin:end]))))
                begin = end
            else:
                media += media_of([entry])
        found[int(number)] = tuple(media)
    return found


def _told(medium: Medium, files: list[bytes]) -> dict[str, Any]:
    """Return what an image is; the bytes of one that lies in no file are added to `files`."""
    source: ImageSource | None = None if medium.source is None else medium.source.place.image()
    if source is None:
        return described(medium)
    if source.data is None:
        where = {"url": source.url} if source.path is None else {"path": source.path}
        return {**described(medium), **where}
    files.append(source.data)
    return {**described(medium), "num_bytes": len(source.data)}
