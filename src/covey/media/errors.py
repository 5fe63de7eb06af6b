"""The error for an image that cannot be used."""

from __future__ import annotations

from covey.errors import CoveyError


class MediaError(CoveyError, ValueError):
    """An image that is missing, cannot be decoded, or has a form or a size that covey does not take. The text
    is one sentence, which begins with the words of its source where there is one."""


class LimitError(MediaError):
    """A limit on the size of images, typed by somebody, at which an image has no token."""
