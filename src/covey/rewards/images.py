"""Images that go to users' code and come from it: as JSON of where they are, opened where the code runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from covey.types import Medium

if TYPE_CHECKING:
    from covey.media.source import ImageSource

NAMES = ("images", "image")
"""The arguments by which a function is given the images of a prompt: all of them, or the first."""

_MARK = "covey_image"


def told(medium: Medium) -> dict[str, Any]:
    """Return an image of a prompt as JSON: where its file is, or what it holds as base64."""
    return _told(medium.source.place.image())


def told_pil(value: Any) -> dict[str, Any] | None:
    """Return a PIL image as JSON; None for any other value."""
    if not type(value).__module__.startswith("PIL."):
        return None
    from covey.media.source import sources_of

    (source,) = sources_of(value)
    return _told(source)


def _told(source: ImageSource) -> dict[str, Any]:
    data = None if source.data is None else base64.b64encode(source.data).decode()
    return {_MARK: True, "path": source.path, "data": data, "url": source.url}


def opened(value: Any) -> Any:
    """Return a value with a PIL image, upright and RGB, in place of each that `told` tells of. Raises
    MediaError where the file can no longer be read."""
    if isinstance(value, list):
        return [opened(one) for one in value]
    if not (isinstance(value, Mapping) and value.get(_MARK) is True):
        return value
    # Most workers are given no image.
    from covey.media.decode import load_image
    from covey.media.source import ImageSource

    data = None if value["data"] is None else base64.b64decode(value["data"])
    return load_image(ImageSource(path=value["path"], data=data, url=value["url"]), may_fetch=True)
