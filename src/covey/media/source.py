"""Where images are: what a column of data, or a block of a message, may hold for one."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from covey.media.base64_text import bytes_of_base64, bytes_of_data_uri, is_base64_of_image
from covey.media.errors import MediaError
from covey.texts import Whole, tr

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# The keys of an object that hold its image, the first one that is not null first. `bytes` and `path` are
# those of the type Image of datasets.
_IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path", "base64", "data", "source")
_IMAGE_TYPES = ("image", "image_url", "input_image")
# Keys and types that hold something else: `{"type": "video", ...}`, `{"input_audio": ...}`.
_OTHER_MEDIA: Mapping[str, Literal["video", "audio"]] = {
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
_OTHER_SUFFIXES: Mapping[str, Literal["video", "audio"]] = {
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".flv"), "video"),
    **dict.fromkeys((".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus", ".aac"), "audio"),
}
# No path is longer, so a longer text is something else.
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image is: in the file at an absolute `path`, in `data`, the bytes of such a file, or at a
    `url`. Exactly one of them is set.

    `ImageSource(path="/data/cats/1.jpg")`
    """

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    url: str | None = None

    def __post_init__(self) -> None:
        assert [self.path, self.data, self.url].count(None) == 2, "an image has one source"

    @property
    def words(self) -> str:
        """Name the source to a person: its path, from the current folder where it lies in there, its URL, or
        `image of 1,204 bytes`."""
        if self.data is not None:
            return tr("image of {num_bytes:,} bytes", num_bytes=len(self.data))
        if self.path is None:
            return str(self.url)
        here = os.path.join(os.getcwd(), "")
        return Whole(self.path.removeprefix(here))


def sources_of(value: Any, base: Path | None = None) -> list[ImageSource]:
    """Return where the images are that a value of a column, or a block of a message, stands for.

    value  a path, a `file://` or http URL, a data URI, base64 text, bytes, a PIL image, an array of uint8
           [height, width, 3], an object with one of these under a key such as `path`, `bytes`, `image`, `url`
           or `image_url`, or a list of all of these. PIL images and arrays become the bytes of a PNG file.
    base   the folder that relative paths start from, by default the current one

    None, empty lists, and objects whose image is null, as in a block that is only a placeholder, give none.
    Raises MediaError for anything else, for video and for audio. No file is opened.

    `sources_of({"type": "image", "path": "cats/1.jpg"}, Path("/data"))` is
    `[ImageSource(path="/data/cats/1.jpg")]`.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [_of_text(value, base)]
    if isinstance(value, os.PathLike):
        return [_of_path(os.fspath(value), base)]
    if isinstance(value, bytes | bytearray | memoryview):
        return [ImageSource(data=bytes(value))]
    if isinstance(value, Mapping):
        return _of_mapping(value, base)
    if isinstance(value, list | tuple):
        return [source for one in value for source in sources_of(one, base)]
    found = _of_pixels(value, base)
    if found is not None:
        return found
    raise MediaError(
        tr(
            "a value of type {name} is no image: expected a path, a URL, base64 text, bytes, or a PIL image",
            name=type(value).__name__,
        )
    )


def _of_text(text: str, base: Path | None) -> ImageSource:
    text = text.strip()
    scheme, colon, rest = text.partition(":")
    match scheme.lower() if colon else "":
        case "http" | "https":
            return ImageSource(url=text)
        case "file" if rest.startswith("//"):
            return _of_path(_path_of_file_url(rest[2:]), base)
        case "data":
            return ImageSource(data=bytes_of_data_uri(text))
        case _ if rest.startswith("//"):
            words = tr(
                "{text}: images are not read from {scheme}:// addresses: download the file and give its path",
                text=text,
                scheme=scheme,
            )
            raise MediaError(words)
    if is_base64_of_image(text):
        return ImageSource(data=bytes_of_base64(text))
    if not text:
        raise MediaError(tr("an empty text names no image; write null where there is none"))
    if len(text) > _LONGEST_PATH:
        raise MediaError(
            tr(
                "a text of {num:,} characters is neither a path nor an image in base64; it begins with "
                "{start!r}",
                num=len(text),
                start=text[:40],
            )
        )
    return _of_path(text, base)


def _of_path(path: str | bytes, base: Path | None) -> ImageSource:
    path = os.path.expanduser(os.fsdecode(path))
    other = _OTHER_SUFFIXES.get(os.path.splitext(path)[1].lower())
    if other is not None:
        raise _other_medium(other, os.path.basename(path))
    return ImageSource(path=os.path.abspath(os.path.join(base or "", path)))


def _path_of_file_url(rest: str) -> str:
    """Return the path of what follows `file://`. Percent signs are escapes, as in a URL, unless a file has
    them in its name."""
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    return path if os.path.isfile(path) else urllib.parse.unquote(path)


def _of_mapping(value: Mapping[Any, Any], base: Path | None) -> list[ImageSource]:
    kind = value.get("type")
    held = {key for key, one in value.items() if isinstance(key, str) and not _is_null(one)}
    for name in (str(kind), *sorted(held)):
        if name in _OTHER_MEDIA:
            raise _other_medium(_OTHER_MEDIA[name], name)
    for key in _IMAGE_KEYS:
        # An object of this key gives bytes as base64 text.
        if key in held and key in ("bytes", "base64", "data") and isinstance(value[key], str):
            text = value[key]
            is_uri = text.startswith("data:")
            return [ImageSource(data=bytes_of_data_uri(text) if is_uri else bytes_of_base64(text))]
        if key in held:
            return sources_of(value[key], base)
    if kind in _IMAGE_TYPES or any(key in value for key in _IMAGE_KEYS):
        return []
    raise MediaError(
        tr(
            "an object with the keys {keys} is no image: expected one of {known}",
            keys=", ".join(map(str, value)) or tr("(none)"),
            known=", ".join(_IMAGE_KEYS[:5]),
        )
    )


def _is_null(value: Any) -> bool:
    """Return whether a value holds nothing: tables fill the columns that a row does not have."""
    return value is None or (isinstance(value, list | tuple) and not value)


def _of_pixels(value: Any, base: Path | None) -> list[ImageSource] | None:
    """Return the images of an object of PIL or numpy, which are imported where there is one; None for any
    other object."""
    if type(value).__module__.partition(".")[0] not in ("PIL", "numpy"):
        return None
    import numpy as np
    from PIL import Image

    from covey.media.pixels import png_bytes

    if isinstance(value, Image.Image):
        return [ImageSource(data=png_bytes(value))]
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype == object:
        return [source for one in value for source in sources_of(one, base)]
    return [ImageSource(data=png_bytes(_of_array(value)))]


def _of_array(array: np.ndarray) -> Image.Image:
    import numpy as np
    from PIL import Image

    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise MediaError(
            tr(
                "an array of {dtype} with the shape {shape} is no image: expected uint8 with the shape "
                "(height, width, 3)",
                dtype=array.dtype.name,
                shape=array.shape,
            )
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _other_medium(kind: Literal["video", "audio"], name: str) -> MediaError:
    """Return the error for a value that holds video or audio; `name` is the key or the file that says so."""
    if kind == "video":
        return MediaError(tr("{name!r} is video; covey trains on text and images", name=name))
    return MediaError(tr("{name!r} is audio; covey trains on text and images", name=name))
