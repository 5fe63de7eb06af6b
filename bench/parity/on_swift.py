"""Pairs scored by ms-swift's `accuracy`: `python on_swift.py PAIRS VALUES`, in an environment that has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from read import score_all
from swift.rewards import orms


def main(pairs: Path, values: Path) -> None:
    """Score each pair by a call of its own, so that one that raises spoils no other."""
    accuracy = orms["accuracy"]()

    def score(gold: Any, completion: str) -> float | None:
        (value,) = accuracy([completion], solution=[gold])
        return value

    score_all(score, pairs, values)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
