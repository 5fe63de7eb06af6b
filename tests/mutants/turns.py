"""Environments of the planted faults of several turns: a sum that is asked for again."""

from __future__ import annotations

import os
from typing import Any

TURNS = 3


class Sums:
    """Asks for a sum three times, and gives a third for each answer that holds it."""

    def reset(self, row: Any, seed: int) -> Any:
        self.prompt, self.solution = row["prompt"], row["solution"]
        return self.prompt

    def step(self, turn: Any) -> Any:
        is_right = f"<answer>{self.solution}</answer>" in turn["content"]
        return self.prompt, turn["number"] == TURNS - 1, is_right / TURNS


class Unseeded(Sums):
    """Begins with a number of the operating system, which no seed reaches."""

    def reset(self, row: Any, seed: int) -> Any:
        first, *others = super().reset(row, seed)
        return [{**first, "content": f"{first['content']} {os.urandom(2).hex()}"}, *others]
