"""What a side that calls math-verify made of each pair: its value, and what it read as gold and as answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import math_verify


def score_all(score: Callable[[Any, str], float | None], pairs: Path, values: Path) -> None:
    """Score the gold and completion of each line of `pairs`, and write a line for each into `values`.

    `value` is what `score` returned, or the name of the error that it raised. `gold` and `answer` are what
    `math_verify.parse` made of them, the text of each part; None where it was not asked.
    """
    parsed: list[list[str]] = []
    parse = math_verify.parse

    def noted(*args: Any, **options: Any) -> Any:
        found = parse(*args, **options)
        parsed.append([str(part) for part in found])
        return found

    math_verify.parse = noted
    with values.open("w", encoding="utf-8") as file:
        for line in pairs.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            parsed.clear()
            value: float | str | None
            try:
                value = score(pair["gold"], pair["completion"])
            except Exception as error:  # noqa: BLE001  what a scorer raises is its answer here
                value = type(error).__name__
            gold, answer = [*parsed, None, None][:2]
            row = {"value": value, "gold": gold, "answer": answer}
            file.write(json.dumps(row) + "\n")
