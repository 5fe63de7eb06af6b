"""Every code that a problem, a warning or a finding can carry, with a title and the reason behind it.

`python -m covey.codes` writes docs/codes.md to standard output, with `--lang zh` docs/codes.zh.md. A code
keeps its meaning for good.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from covey.codes.configuration import CONFIGURATION
from covey.codes.directory import DIRECTORY
from covey.codes.findings import FINDINGS
from covey.codes.inputs import INPUTS
from covey.codes.publishing import PUBLISHING
from covey.codes.rewards import REWARDS
from covey.codes.rows import ROWS
from covey.codes.servers import SERVERS
from covey.codes.signs import HANGS, SIGNS
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


TABLE = sorted(
    (
        *(*CONFIGURATION, *INPUTS, *WARNINGS, *START, *SERVERS, *REWARDS, *ROWS),
        *(*FINDINGS, *PUBLISHING, *SIGNS, *HANGS, *DIRECTORY, *VLLM),
    ),
    key=lambda entry: ("EWF".index(entry[0][0]), entry[0]),
)

CODES: dict[str, Code] = {code: Code(code=code, title=title, why=why) for code, title, why in TABLE}
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
