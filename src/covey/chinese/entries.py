"""The files of texts: entries of a few lines each, with a blank line between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def entries(path: Path, num_lines: int) -> Iterator[list[str]]:
    """Yield the lines of each entry; a line that begins with `#` is a comment."""
    kept = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    for block in "\n".join(kept).split("\n\n"):
        if block.strip():
            lines = block.strip("\n").split("\n")
            assert len(lines) == num_lines, f"{path.name}: {block!r}"
            yield lines
