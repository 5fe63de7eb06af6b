"""What a user can mend in data, models and templates: each error is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from covey.errors import CoveyError


class DataError(CoveyError, ValueError):
    """Data that is missing or cannot be read; the words name the place of the fault."""


class ModelError(CoveyError, ValueError):
    """A model whose files cannot be found or fetched."""


class TemplateError(CoveyError, ValueError):
    """A chat template that is missing, or that refused the messages it was given."""


class RowFault(Exception):
    """A row that cannot be read: why, as a key of `plan/reasons.py`, and what stands there."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def one_line(error: object) -> str:
    """The words of an error without its line breaks."""
    return " ".join(str(error).split())


def nearest(name: str, names: Iterable[str]) -> str:
    """` (nearest: main)`, or nothing where no name is near."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f" (nearest: {matches[0]})" if matches else ""
