"""Images of requests as a client and a rollout server send them.

A request names its images, as JSON. Their files are sent apart from it, each once, under the keys of their
bytes. No torch, so that a check may import it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode

from covey.data.vision import ImageAt
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.rollout.server.values import WireError, fields_of
from covey.texts import tr
from covey.types import Medium

IMAGE_BYTES = 256 << 20
"""The largest file of an image."""
HELD_BYTES = 1 << 30
"""The files of images that a server keeps."""
IMAGES = 256
"""The most images of a request."""
IMAGES_OF_CALL = 64
"""The most images of a call with several requests that have others, so that all are held at once."""

# Any number of an image: pixels, tokens, an id.
_MOST = 1 << 40
_KEY = re.compile("[0-9a-f]{16}")


class _Named:
    """An image that is known by its key."""

    def image(self) -> ImageSource:
        """Fail: it is replaced before a request is sampled."""
        raise AssertionError("a request that is sampled has the files of its images")


def media_body(media: Sequence[Medium]) -> list[dict[str, Any]]:
    """Return images as JSON: `[{"key": "9f3c…", "token_id": 151655, "num_tokens": 64, "grid": [1, 16, 16],
    "extent": [1, 8, 8], "limits": [14, 2, 2, 3136, 1003520]}]`."""
    return [
        {
            "key": medium.key,
            "token_id": medium.token_id,
            "num_tokens": medium.num_tokens,
            "grid": list(medium.grid),
            "extent": None if medium.extent is None else list(medium.extent),
            "limits": medium.source.limits.numbers,
        }
        for medium in media
    ]


def media_of(body: Any) -> tuple[Medium, ...]:
    """Return images of JSON, whose files are not here; WireError where it is another thing."""
    if not isinstance(body, list) or len(body) > IMAGES:
        raise WireError(f"media is a list of at most {IMAGES} images")
    return tuple(_medium(one) for one in body)


def _medium(body: Any) -> Medium:
    given = fields_of(body, ("key", "token_id", "num_tokens", "grid", "extent", "limits"))
    time, down, across = _numbers("grid", given["grid"], 3)
    extent = None if given["extent"] is None else _numbers("extent", given["extent"], 3)
    token_id, num_tokens = _numbers("token_id and num_tokens", [given["token_id"], given["num_tokens"]], 2)
    return Medium(
        key=_key(given["key"]),
        token_id=token_id,
        num_tokens=num_tokens,
        grid=(time, down, across),
        extent=None if extent is None else (extent[0], extent[1], extent[2]),
        source=ImageAt(_Named(), _limits(given["limits"])),
    )


def _key(body: Any) -> str:
    if not isinstance(body, str) or _KEY.fullmatch(body) is None:
        raise WireError("the key of an image is 16 hexadecimal digits")
    return body


def _numbers(name: str, body: Any, length: int) -> list[int]:
    if not isinstance(body, list) or len(body) != length or any(not _is_number(one) for one in body):
        raise WireError(f"{name} of an image is {length} whole numbers above 0")
    return body


def _limits(body: Any) -> ImageLimits:
    """Return limits of images, which have a sixth number for a model that takes squares."""
    has_tile = isinstance(body, list) and len(body) == 6
    return ImageLimits(*_numbers("limits", body, 6 if has_tile else 5))


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def keys_of(body: Any) -> list[str]:
    """Return the keys of images that are asked for."""
    if not isinstance(body, list) or len(body) > IMAGES:
        raise WireError(f"keys is a list of at most {IMAGES} keys")
    return [_key(one) for one in body]


def missing_of(body: Any, asked: Collection[str]) -> list[str]:
    """Return which of the images that it was asked for a server says that it lacks."""
    missing = body.get("missing") if isinstance(body, dict) else None
    if not isinstance(missing, list) or any(one not in asked for one in missing):
        raise WireError(tr("it lacks images that it was not asked for: {body!r:.80}", body=body))
    return missing


def query_of(medium: Medium) -> str:
    """Return what stands in the address to which the file of an image is sent."""
    return urlencode({"key": medium.key, "limits": medium.source.limits.words})


def key_and_limits(query: str) -> tuple[str, ImageLimits]:
    """Return the key of a file that is sent, and within which limits it is that of the file."""
    given = {name: values[0] for name, values in parse_qs(query).items()}
    words = given.get("limits", "").split()
    numbers = [int(word) if word.isascii() and word.isdigit() and len(word) < 14 else 0 for word in words]
    return _key(given.get("key")), _limits(numbers)
