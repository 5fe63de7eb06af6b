"""The parts of `make gpu-check`: what each does, how long it may take, and which function runs it.

The limits of the default parts add up to at most 270 seconds, all of them to at most 600. A part does the
most important work first and leaves out cases that it has no time for.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SECONDS, ALL_SECONDS = 270, 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. `module` has a function `run(lines)`; a `checks` part fails when it is not finished."""

    number: int
    name: str
    module: str
    limit_s: float
    checks: bool
    is_default: bool = True


PARTS = (
    Part(number=0, name="machine", module="versions", limit_s=20, checks=True),
    Part(number=1, name="engine", module="engine", limit_s=62, checks=True),
    Part(number=2, name="gradients", module="gradients", limit_s=58, checks=True),
    Part(number=3, name="train", module="train", limit_s=46, checks=True),
    Part(number=4, name="decode", module="decode", limit_s=80, checks=False),
    Part(number=5, name="training", module="training", limit_s=110, checks=False, is_default=False),
    Part(number=6, name="steps", module="steps", limit_s=150, checks=False, is_default=False),
    Part(number=7, name="families", module="families", limit_s=66, checks=True, is_default=False),
)


def chosen(words: str) -> list[Part]:
    """Parts by numbers or names with commas between them, `all`, or the default ones for no word.

    Raises ValueError with the words that name no part.
    """
    asked = [word.strip() for word in words.split(",") if word.strip()]
    if not asked:
        return [part for part in PARTS if part.is_default]
    known = {"all", *(p.name for p in PARTS), *(str(p.number) for p in PARTS)}
    if unknown := [word for word in asked if word not in known]:
        names = ", ".join(f"{p.number} {p.name}" for p in PARTS)
        raise ValueError(f"no such part: {', '.join(unknown)}. Parts: {names}, all")
    return [p for p in PARTS if {"all", p.name, str(p.number)} & set(asked)]
