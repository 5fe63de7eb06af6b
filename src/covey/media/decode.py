"""Images of their sources: size and pixels, or in one sentence why there are none."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from PIL import Image, UnidentifiedImageError

from covey.media.errors import MediaError
from covey.media.fetch import fetched
from covey.media.formats import READ, format_of, other_kind_of
from covey.media.pixels import BROKEN, upright_rgb, upright_size
from covey.media.source import ImageSource
from covey.paths import trouble
from covey.texts import tr

# Bytes at the beginning of a file by which it is recognized, and how many of them are shown.
_HEAD_BYTES, _SHOWN_BYTES = 512, 32


def image_size(source: ImageSource, *, may_fetch: bool = False) -> tuple[int, int]:
    """Return width and height of an image, as EXIF turns it, from the header of its file.

    With `may_fetch` an image at a URL is fetched. Raises MediaError as `load_image` does, for what its header
    shows.
    """
    with _opened(source, may_fetch) as image:
        return upright_size(image)


def load_image(source: ImageSource, *, may_fetch: bool = False, content: bytes | None = None) -> Image.Image:
    """Return an image in mode RGB as `upright_rgb` gives it; of an animation, its first frame.

    With `may_fetch` an image at a URL is fetched; with `content`, what `read_bytes` returned, nothing is read
    again. Raises MediaError for a file that is missing, cannot be read, is empty, is no image, ends early, or
    has more pixels than Pillow decodes.
    """
    with _opened(source, may_fetch, content) as image:
        return upright_rgb(image)


def read_bytes(source: ImageSource, *, may_fetch: bool = False) -> bytes:
    """Return the bytes of an image's file. Raises MediaError if there is no such file, or it is empty."""
    if source.data is not None:
        if not source.data:
            raise MediaError(tr("an image in the data has 0 bytes"))
        return source.data
    if source.url is not None:
        return fetched(source.url, may_fetch)
    with _file(source) as stream:
        return stream.read()


@contextmanager
def _opened(source: ImageSource, may_fetch: bool, content: bytes | None = None) -> Iterator[Image.Image]:
    """Open an image without decoding its pixels, and turn errors of Pillow, then or in the block, into
    MediaError."""
    with _stream(source, may_fetch) if content is None else io.BytesIO(content) as stream:
        try:
            Image.init()
            with Image.open(stream, formats=[name for name in READ if name in Image.OPEN]) as image:
                yield image
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            words = tr(
                "{source} has too many pixels to be decoded: {error}", source=source.words, error=str(error)
            )
            raise MediaError(words) from error
        except BROKEN as error:
            raise _unreadable(source, stream, error) from error


@contextmanager
def _stream(source: ImageSource, may_fetch: bool) -> Iterator[IO[bytes]]:
    if source.path is None:
        yield io.BytesIO(read_bytes(source, may_fetch=may_fetch))
    else:
        with _file(source) as stream:
            yield stream


def _file(source: ImageSource) -> IO[bytes]:
    path = str(source.path)
    found = trouble(path)
    if found is not None:
        raise MediaError(tr("{source} {why}", source=source.words, why=found.words))
    if os.path.isdir(path):
        raise MediaError(tr("{source} is a directory, not an image", source=source.words))
    if not os.path.exists(path):
        raise MediaError(tr("{source} does not exist", source=source.words))
    if not os.path.isfile(path):
        raise MediaError(tr("{source} is a device or a pipe, not an image", source=source.words))
    if os.path.getsize(path) == 0:
        raise MediaError(tr("{source} is empty: the file has 0 bytes", source=source.words))
    return open(path, "rb")


def _unreadable(source: ImageSource, stream: IO[bytes], error: BaseException) -> MediaError:
    """Return the error for content that Pillow does not read."""
    stream.seek(0)
    head = stream.read(_HEAD_BYTES)
    num_bytes = stream.seek(0, os.SEEK_END)
    name, kind = format_of(head), other_kind_of(head)
    start = head[:_SHOWN_BYTES].decode("ascii", "backslashreplace")
    if name is not None:
        # Of a file whose header is cut off it says only that no decoder takes it.
        is_unknown = isinstance(error, UnidentifiedImageError)
        words = tr(
            "{source} is {name} of {num_bytes:,} bytes that cannot be decoded: {error}",
            source=source.words,
            name=name,
            num_bytes=num_bytes,
            error=tr("its header is damaged or cut off") if is_unknown else _reason(error),
        )
    elif kind:
        words = tr(
            "{source} is no image but {kind}; it begins with {start!r}",
            source=source.words,
            kind=kind,
            start=start,
        )
    elif isinstance(error, UnidentifiedImageError):
        words = tr(
            "{source} is no image of a format that covey reads (PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, "
            "JPEG 2000); it begins with {start!r}",
            source=source.words,
            start=start,
        )
    else:
        words = tr("{source} cannot be decoded: {error}", source=source.words, error=_reason(error))
    return MediaError(words)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
