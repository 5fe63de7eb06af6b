"""Images for rewards: told as JSON of where they are, and opened where the function is called."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from covey.media.decode import load_image
from covey.media.source import ImageSource
from covey.types import Medium

NAMES = ("images", "image")
"""The arguments by which a function is given the images of a prompt: all of them, or the first."""

_FIELDS = ("path", "data", "url")
_MARK = "covey_image"


def told(medium: Medium) -> dict[str, Any]:
    """Return an image of a prompt as JSON: where its file is, or what it holds as base64."""
    source: ImageSource = medium.source.place.image()
    data = None if source.data is None else base64.b64encode(source.data).decode()
    return {_MARK: True, "path": source.path, "data": data, "url": source.url}


def opened(value: Any) -> Any:
    """Return a value with a PIL image, upright and RGB, in place of each that `told` tells of. Raises
    MediaError where the file can no longer be read."""
    if isinstance(value, list):
        return [opened(one) for one in value]
    if not (isinstance(value, Mapping) and value.get(_MARK) is True):
        return value
    path, data, url = (value[name] for name in _FIELDS)
    source = ImageSource(path=path, data=None if data is None else base64.b64decode(data), url=url)
    return load_image(source, may_fetch=True)
