"""Pairs scored by math-verify alone: `python on_math_verify.py readme|trl PAIRS VALUES`.

`readme` calls it with its defaults, as its README does; `trl` as `trl.rewards.accuracy_reward` of TRL 1.16
does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import math_verify
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig
from read import score_all


def readme(gold: Any, completion: str) -> float | None:
    """The value by the defaults; None where the gold is not read, since there is nothing to compare with."""
    parsed = math_verify.parse(gold)
    return float(math_verify.verify(parsed, math_verify.parse(completion))) if parsed else None


def trl(gold: Any, completion: str) -> float | None:
    """The value by TRL's options: of the completion only LaTeX is read, boxes first."""
    parsed = math_verify.parse(gold, parsing_timeout=10)
    if not parsed:
        return None
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = math_verify.parse(
        completion, extraction_config=[config], extraction_mode="first_match", parsing_timeout=10
    )
    return float(math_verify.verify(parsed, answer, timeout_seconds=5))


if __name__ == "__main__":
    score_all({"readme": readme, "trl": trl}[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
