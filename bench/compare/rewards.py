"""Rewards in TRL's form, the same functions for every side."""

from __future__ import annotations

import re
from typing import Any


def answer(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
    """1 where the answer between the tags is the gold, else 0."""
    texts = [c[0]["content"] for c in completions]
    return [float(f"<answer>{gold}</answer>" in text) for text, gold in zip(texts, solution, strict=True)]


def number(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
    """1 where the last number of a text is the gold, else 0."""
    found = [re.findall(r"\d+", c[0]["content"]) for c in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, solution, strict=True)]


def form(completions: Any, **kwargs: Any) -> list[float]:
    """1 where a text is a thought and an answer and nothing else, else 0."""
    return [
        float(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", c[0]["content"], re.S) is not None)
        for c in completions
    ]


def length(completions: Any, **kwargs: Any) -> list[float]:
    """Differs within every group."""
    return [float(len(c[0]["content"]) % 7) + len(set(c[0]["content"])) for c in completions]


def half(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
    """The answer where the gold is even; where it is odd every completion scores 1."""
    found = answer(completions, solution)
    return [1.0 if int(gold) % 2 else score for score, gold in zip(found, solution, strict=True)]
