"""Products of two-digit numbers: the embedded task that needs a calculator, in training and held-out pairs.

The module is pure Python, so that reading the task costs no import of torch or transformers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

MODEL_DIR: Path = Path(__file__).resolve().parent / "tools_model"
"""The folder of the embedded model that calls the calculator, and of its tokenizer."""

TOOL = "covey.quickstart.calculator:calculate"
"""The function that the model calls, as `--tools` takes it."""

HELD_OUT = 512
"""Counts the pairs, of 8,100 ordered ones, that serve evaluation only."""

_OPERANDS = range(10, 100)
_SPLIT_SEED = 20_261

Pair = tuple[int, int]


def _split() -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Return the held-out and the training pairs, both in a fixed random order."""
    rng = random.Random(_SPLIT_SEED)
    pairs = [(a, b) for a in _OPERANDS for b in _OPERANDS]
    rng.shuffle(pairs)
    return tuple(pairs[:HELD_OUT]), tuple(pairs[HELD_OUT:])


def held_out_pairs() -> list[Pair]:
    """Return the fixed `HELD_OUT` pairs that serve evaluation only."""
    return list(_split()[0])


def training_pairs() -> list[Pair]:
    """Return every pair that is not held out, in a fixed random order."""
    return list(_split()[1])


def prompt_text(a: int, b: int) -> str:
    """Return the user's question for one pair."""
    return f"What is {a}*{b}?"


def _row(a: int, b: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt_text(a, b)}], "solution": str(a * b)}


def training_rows() -> list[dict[str, Any]]:
    """Return one row of `messages` and `solution` per training pair."""
    return [_row(a, b) for a, b in training_pairs()]


def held_out_rows() -> list[dict[str, Any]]:
    """Return one row of `messages` and `solution` per held-out pair."""
    return [_row(a, b) for a, b in held_out_pairs()]
