"""Output to a terminal: text without escape sequences, and JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from covey.texts.values import UNSAFE, visible


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a text and a line break to standard output, or to another stream, at once."""
    stream = sys.stdout if stream is None else stream
    stream.write(visible(text) + "\n")
    stream.flush()


def say_json(content: Any) -> None:
    """Write an object as JSON. Values are complete, and control characters are escaped."""
    text = json.dumps(content, ensure_ascii=False, indent=2)
    sys.stdout.write(UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    sys.stdout.flush()
