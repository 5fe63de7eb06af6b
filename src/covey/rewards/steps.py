"""The steps of a completion: its text, cut at a separator."""

from __future__ import annotations

from itertools import accumulate

STEP_SEPARATOR = "\n\n"
"""What steps end with where nothing else is said."""


def steps_of(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators, without an empty one at its end.

    `steps_of("a\\n\\nb\\n\\n", "\\n\\n")` is `["a", "b"]`; an empty text has no step.
    """
    pieces = text.split(separator)
    return pieces if pieces[-1] else pieces[:-1]


def step_ends(text: str, separator: str) -> list[int]:
    """Where each step ends in the text, in characters: behind its separator, and the last with the text.

    `step_ends("a\\n\\nb\\n\\n", "\\n\\n")` is `[3, 6]`.
    """
    lengths = [len(piece) + len(separator) for piece in steps_of(text, separator)]
    return [min(end, len(text)) for end in accumulate(lengths)]
