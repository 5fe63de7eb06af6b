"""Images that are written as text: base64, and data URIs."""

from __future__ import annotations

import base64
import binascii
import urllib.parse

from covey.media.errors import MediaError
from covey.media.formats import format_of
from covey.texts import tr

# The fewest characters of base64 that an image takes, and the most that a path has: a longer text is not
# decoded as a whole to know what it is.
_FEWEST, _LONGEST_PATH = 48, 4096


def is_base64_of_image(text: str) -> bool:
    """Return whether a text is base64 of an image, by the signature in its first bytes."""
    head = "".join(text[:_LONGEST_PATH].split())
    if len(head) < _FEWEST:
        return False
    head = head if len(text) <= _LONGEST_PATH else head[:_FEWEST]
    try:
        return format_of(_decoded(head)) is not None
    except binascii.Error:
        return False


def bytes_of_base64(text: str) -> bytes:
    """Return the bytes of base64 text, with or without line breaks and padding, in either alphabet. Raises
    MediaError for other characters."""
    try:
        return _decoded("".join(text.split()))
    except binascii.Error as error:
        raise MediaError(
            tr(
                "a text of {num:,} characters that begins with {start!r} is no valid base64: {error}",
                num=len(text),
                start=text[:20],
                error=str(error),
            )
        ) from error


def bytes_of_data_uri(text: str) -> bytes:
    """Return the bytes of `data:image/png;base64,...`. Raises MediaError where they are no image by its type,
    or no base64."""
    head, comma, body = text.partition(",")
    kind, *parameters = head[len("data:") :].lower().split(";")
    if not comma:
        raise MediaError(tr("a data URI without a comma holds no image: {start!r}", start=text[:40]))
    if kind.startswith(("video/", "audio/", "text/")):
        raise MediaError(tr("a data URI of type {kind} is no image", kind=kind))
    body = urllib.parse.unquote(body) if "%" in body and "base64" in parameters else body
    return bytes_of_base64(body) if "base64" in parameters else urllib.parse.unquote_to_bytes(body)


def _decoded(text: str) -> bytes:
    # b64decode raises a plain ValueError for these.
    if not text.isascii():
        raise binascii.Error("non-ASCII characters")
    text = text.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=_alphabet(text), validate=True)


def _alphabet(text: str) -> bytes:
    return b"-_" if "-" in text or "_" in text else b"+/"
