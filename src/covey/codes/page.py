"""The pages of codes, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

from covey.chinese.codes import PAGE_COLUMNS, PAGE_HEAD, PAGE_SECTIONS
from covey.codes import CODES, Code, chinese_codes

_SECTIONS = {
    "E1": "Options and values",
    "E2": "Batch and memory",
    "E3": "Model, data and rewards",
    "E4": "Output and resume",
    "W1": "Warnings",
    "F1": "Findings of a run",
    "F2": "Signs that a run goes wrong",
    "F3": "Hangs",
}


_HEAD = """\
# Codes

Every message of covey carries a code. `covey explain CODE` prints the same text.
E: the configuration or the input is at fault, and nothing was started (exit code 2).
W: the run goes on. F: what a run finds out about itself; a guard that stops it exits with 3.
"""
_COLUMNS = "| code | title | why |"


def markdown() -> str:
    """Return docs/codes.md."""
    return page(CODES, _HEAD, _SECTIONS, _COLUMNS)


def markdown_chinese() -> str:
    """Return docs/codes.zh.md."""
    sections = {prefix: PAGE_SECTIONS.get(prefix, heading) for prefix, heading in _SECTIONS.items()}
    return page(chinese_codes(), PAGE_HEAD, sections, PAGE_COLUMNS)


def page(codes: Mapping[str, Code], head: str, sections: Mapping[str, str], columns: str) -> str:
    """Return a page with a table of codes under each heading."""
    lines = [head.rstrip()]
    for prefix, heading in sections.items():
        lines += ["", f"## {heading}", "", columns, "|---|---|---|"]
        lines += [f"| {c.code} | {c.title} | {c.why} |" for c in codes.values() if c.code.startswith(prefix)]
    return "\n".join(lines) + "\n"
