"""The pages of the documentation that name each code, which `covey explain` prints: `python -m
support.code_pages` writes them, since the documentation is not installed with covey."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import covey

PAGES = Path(covey.__file__).parent / "codes" / "pages.json"
DOCS = Path(covey.__file__).parents[2] / "docs"
_NO_PAGES = ("codes.md", "codes.zh.md", "options.md")
_MOST = 3
_CODE = re.compile(r"\b[EWF][0-9]{3}\b")


def anchor(heading: str) -> str:
    """Return what a link to a heading ends with: `What is it?` is "what-is-it"."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def rendered() -> str:
    """Return the content of pages.json: for each code up to three sections that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(DOCS.glob("*.md")):
        section = f"docs/{path.name}"
        for line in path.read_text(encoding="utf-8").splitlines() if path.name not in _NO_PAGES else ():
            if heading := re.match(r"#{2,} (.+)", line):
                section = f"docs/{path.name}#{anchor(heading[1])}"
            for code in _CODE.findall(line):
                if section not in found[code] and len(found[code]) < _MOST:
                    found[code].append(section)
    return json.dumps(dict(sorted(found.items())), indent=1) + "\n"


if __name__ == "__main__":
    PAGES.write_text(rendered(), encoding="utf-8")
