"""The text between `<answer>` and `</answer>`: the one place that takes it out."""

from __future__ import annotations

OPEN, CLOSE = "<answer>", "</answer>"


def answer_tag(text: str, *, is_closed: bool = True) -> str | None:
    """The text in the last closed `<answer>`; None without one.

    With `is_closed` False, what follows the last `<answer>` counts too, where no tag is closed.
    """
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    if start >= 0:
        return text[start + len(OPEN) :].split(CLOSE, 1)[0]
    if is_closed or OPEN not in text:
        return None
    return text.rpartition(OPEN)[2]
