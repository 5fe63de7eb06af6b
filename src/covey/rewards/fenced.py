"""The program in a completion: where it stands between fences of three backticks."""

from __future__ import annotations

from covey.rewards.tags import answer_tag

_PYTHON = ("python", "python3", "py")


def program_of(text: str) -> str | None:
    """The last closed block of Python, else the last without a language; None where there is none.

    Where the text has an `<answer>`, the last of them is searched and nothing else.
    """
    blocks = _blocks(answer_tag(text) or text)
    named = [code for tag, code in blocks if tag in _PYTHON]
    programs = named or [code for tag, code in blocks if not tag]
    return programs[-1] if programs else None


def has_named_program(text: str) -> bool:
    """Whether there is a closed block that says it is Python, at the same place."""
    return any(tag in _PYTHON for tag, _ in _blocks(answer_tag(text) or text))


def _blocks(text: str) -> list[tuple[str, str]]:
    """The closed blocks, each with its language: a line that ends in a fence and at most one word opens one,
    a line that begins with a fence closes it."""
    blocks = []
    tag: str | None = None
    held: list[str] = []
    for line in text.splitlines(keepends=True):
        _, fence, word = line.rpartition("```")
        if tag is not None and line.strip().startswith("```"):
            blocks.append((tag, "".join(held)))
            tag = None
        elif tag is not None:
            held.append(line)
        elif fence and len(word.split()) <= 1:
            tag, held = word.strip().lower(), []
    return blocks
