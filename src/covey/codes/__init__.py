"""Every code that a problem, a warning or a finding can carry, with a title and the reason behind it.

`python -m covey.codes` writes docs/codes.md to standard output, with `--lang zh` docs/codes.zh.md. A code
keeps its meaning for good.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from covey.codes.configuration import CONFIGURATION
from covey.codes.directory import DIRECTORY
from covey.codes.findings import FINDINGS
from covey.codes.hangs import HANGS
from covey.codes.inputs import INPUTS
from covey.codes.publishing import PUBLISHING
from covey.codes.servers import SERVERS
from covey.codes.start import START
from covey.codes.vllm import VLLM
from covey.codes.warnings import WARNINGS
from covey.texts.catalogue import catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code: what it is called and why what it names is worth a stop or a word."""

    code: str
    title: str
    why: str


BESIDE = (
    "covey.checks.check_list:CODES_OF_CHECKS",
    "covey.health.rule_list:RULES",
    "covey.health.guard_list:CODES_OF_GUARDS",
)
"""Packages whose files declare codes beside their checks; they import this module, so it names them."""

_TABLE = (
    *(*CONFIGURATION, *INPUTS, *WARNINGS, *START, *SERVERS),
    *(*FINDINGS, *PUBLISHING, *HANGS, *DIRECTORY, *VLLM),
)


class _Codes(Mapping[str, Code]):
    """Every code by its name, E before W before F. Those of `BESIDE` are read when one of them, or all, is
    asked for."""

    def __init__(self) -> None:
        self._known = {code: Code(code=code, title=title, why=why) for code, title, why in _TABLE}
        assert len(self._known) == len(_TABLE), "a code is declared twice"
        self._unread = list(BESIDE)

    def _read_next(self) -> None:
        module, _, name = self._unread.pop(0).partition(":")
        for entry in getattr(import_module(module), name):
            assert entry.code not in self._known, f"{entry.code} is declared twice"
            self._known[entry.code] = Code(code=entry.code, title=entry.title, why=entry.why)
        if not self._unread:
            ordered = sorted(self._known.items(), key=lambda item: ("EWF".index(item[0][0]), item[0]))
            self._known = dict(ordered)

    def _all(self) -> dict[str, Code]:
        while self._unread:
            self._read_next()
        return self._known

    def __getitem__(self, code: str) -> Code:
        while code not in self._known and self._unread:
            self._read_next()
        return self._known[code]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


CODES: Mapping[str, Code] = _Codes()
"""The registry, by code."""


def chinese_codes() -> dict[str, Code]:
    """Return the registry in Chinese."""
    said = catalogue("zh").said
    return {c.code: Code(code=c.code, title=said(c.title), why=said(c.why)) for c in CODES.values()}


def pages_of_codes() -> dict[str, list[str]]:
    """Return the sections of the documentation that name each code."""
    pages: dict[str, list[str]] = json.loads(
        (Path(__file__).parent / "pages.json").read_text(encoding="utf-8")
    )
    return pages
