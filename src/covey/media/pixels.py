"""Pixels of opened images: turned upright, on white, as RGB with 8 bits a channel."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping

import numpy as np
from PIL import ExifTags, Image

from covey.media.errors import MediaError
from covey.texts import tr

BROKEN = (
    *(OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError),
    *(EOFError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError),
)
"""The exceptions that Pillow raises for a file with faulty content. Most come from Python itself."""

_TURNS: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn or flip that makes an image upright, by its EXIF orientation (2 to 8; 1 needs none)."""


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an image as `upright_rgb` gives it, from its header."""
    width, height = image.size
    return (height, width) if _orientation(image) >= 5 else (width, height)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return an image, which is decoded if it was not, in mode RGB: turned as its EXIF says, transparent
    pixels laid on white, and grey of 16 bits and more brought to 8 by division."""
    # Before the pixels: a TIFF file forgets its orientation as it is decoded.
    turn = _TURNS.get(_orientation(image))
    image.load()
    if image.mode.startswith(("I", "F")):
        rgb = Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        rgb = Image.new("RGB", rgba.size, "white")
        rgb.paste(rgba, mask=rgba.getchannel("A"))
    else:
        rgb = image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def png_bytes(image: Image.Image) -> bytes:
    """Return a PNG file with the pixels of `upright_rgb`. Raises MediaError if they cannot be decoded."""
    stream = io.BytesIO()
    try:
        upright_rgb(image).save(stream, "PNG", compress_level=1)
    except BROKEN as error:
        raise MediaError(
            tr("a PIL image of {size} pixels cannot be decoded: {error}", size=image.size, error=str(error))
        ) from error
    return stream.getvalue()


def _orientation(image: Image.Image) -> int:
    """Return how an image lies, from 1 to 8, as EXIF or XMP before its pixels says; 1 where they say nothing
    that can be read."""
    # Pillow turns a TIFF image itself, as it is decoded, and its size before.
    if image.format == "TIFF":
        return 1
    try:
        # The method of a PNG image decodes its pixels, to look behind them.
        said = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except BROKEN:
        return 1
    return said if isinstance(said, int) and said in _TURNS else 1


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Return grey values as uint8 from 0 to 255.

    Those of 16 bits are divided by 257. For wider ones the range that they stand for is the narrowest of
    0 to 1 (floats alone), 0 to 255 and 0 to 65535 that holds all of them; failing these, their own.
    """
    values = values.astype(np.float32)
    if mode.startswith("I;16"):
        return np.rint(values / 257).astype(np.uint8)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    for top in (*((1.0,) if mode == "F" else ()), 255.0, 65535.0):
        if low >= 0 and high <= top:
            low, high = 0.0, top
            break
    values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    return np.rint((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
