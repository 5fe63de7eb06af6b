"""What a user can mend in data, models and templates: each error is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from covey.errors import CoveyError
from covey.plan.reasons import DataFault
from covey.texts import tr


class DataError(CoveyError, ValueError):
    """Data that is missing or cannot be read; the words name the place of the fault.

    kind      what is known beyond the words, or ""
    subject   the source or file that the words begin with, "" where it is none
    within    the words without it, where it is a place before them: `line 3: ...`
    option    the option that the words are about, "" where it is that of the source
    line      the number of the line, 0 where it is none
    encoding  what a text is encoded in, "" where that is not known
    columns   names of columns, old to new, that work in place of those that were typed, or None
    """

    columns: Mapping[str, str] | None = None

    def __init__(
        self,
        words: str,
        *,
        kind: DataFault = "",
        subject: object = "",
        within: str = "",
        option: str = "",
        line: int = 0,
        encoding: str = "",
    ) -> None:
        super().__init__(words)
        self.kind, self.subject, self.within = kind, str(subject), within
        self.option, self.line, self.encoding = option, line, encoding


def in_file(path: Path, words: str, *, kind: DataFault = "", line: int = 0) -> DataError:
    """The error for a place in a file, with which the words begin: `line 3: ...`."""
    return DataError(
        tr("{path}, {words}", path=path, words=words), kind=kind, subject=path, within=words, line=line
    )


class ModelError(CoveyError, ValueError):
    """A model whose files cannot be found or fetched: `kind` is what is known beyond the words, as of
    `ModelProblem`, and `subject` the name that they begin with."""

    def __init__(self, words: str, *, kind: str = "", subject: object = "") -> None:
        super().__init__(words)
        self.kind, self.subject = kind, str(subject)


class TemplateError(CoveyError, ValueError):
    """A chat template that is missing, or that refused the messages it was given.

    `kind` is what is known beyond the words: unreadable_template, broken_template, refusing_template.
    `names_option` is whether they speak of the option that gives the template, or something to it.
    """

    def __init__(self, words: str, *, kind: str = "", names_option: bool = False) -> None:
        super().__init__(words)
        self.kind, self.names_option = kind, names_option


class RowFault(Exception):
    """A row that cannot be read: why, as a key of `plan/reasons.py`, what stands there, and the role of the
    message that is lost."""

    def __init__(self, reason: str, detail: str = "", role: str = "") -> None:
        super().__init__(reason, detail, role)
        self.reason, self.detail, self.role = reason, detail, role


def one_line(error: object) -> str:
    """The words of an error without its line breaks."""
    return " ".join(str(error).split())


def nearest(name: str, names: Iterable[str]) -> str:
    """` (nearest: main)`, or nothing where no name is near."""
    near = nearest_name(name, names)
    return "" if near is None else tr(" (nearest: {matches})", matches=near)


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The name that is nearest to one that is not there; None where no name is near."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)
