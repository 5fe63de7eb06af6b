"""Writes the page of codes to standard output: `python -m covey.codes [--lang zh]`."""

from __future__ import annotations

import sys

from covey.codes.page import markdown, markdown_chinese

if __name__ == "__main__":
    sys.stdout.write(markdown_chinese() if sys.argv[1:] == ["--lang", "zh"] else markdown())
