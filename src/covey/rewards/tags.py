"""The text between `<answer>` and `</answer>`: the one place that takes it out."""

from __future__ import annotations

import re

_OPEN = re.compile("<answer>", re.IGNORECASE)
_CLOSE = re.compile("</answer>", re.IGNORECASE)


def answer_tag(text: str, *, is_closed: bool = True) -> str | None:
    """The text in the last closed `<answer>`; None without one.

    With `is_closed` False, what follows the last `<answer>` counts too, where no tag is closed.
    """
    closed = [m.start() for m in _CLOSE.finditer(text)]
    opened = [m.end() for m in _OPEN.finditer(text)]
    before = [end for end in opened if closed and end <= closed[-1]]
    if before:
        return text[before[-1] : next(start for start in closed if start >= before[-1])]
    return text[opened[-1] :] if opened and not is_closed else None
