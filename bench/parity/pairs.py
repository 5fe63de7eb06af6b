"""The pairs of gold and completion, and what each side makes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "tests" / "golden" / "accuracy_pairs.jsonl"
NAMES: Mapping[str, str] = {"covey": "covey", "readme": "math-verify", "trl": "TRL", "swift": "ms-swift"}
# A gold that is a formula, and one that says itself where its answer is or is in words.
_FORMULA = re.compile(r"[\\^_=<>|(\[+]")
_MARKED = re.compile(r"\\boxed|\$|<answer>|####|\\\(|\\\[|[\u4e00-\u9fff\"]|\s[a-z]{2,}\s")
# ms-swift looks for its hub; a refused connection spares the wait.
_NOWHERE = "http://127.0.0.1:9"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "http_proxy": _NOWHERE, "https_proxy": _NOWHERE}


class SideFailed(Exception):
    """A side's process ended in an error; the message is its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A line of the table; `right` is 1, 0, or None where the gold can be compared with nothing."""

    source: str
    kind: str
    gold: Any
    completion: str
    right: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a side makes of a pair: its value, None or the name of an error where it gives none; and what
    math-verify read as gold and answer, None where that is not known."""

    value: float | str | None
    gold: tuple[str, ...] | None = None
    answer: tuple[str, ...] | None = None

    @property
    def score(self) -> float | None:
        """The value, None where there is no number."""
        return None if isinstance(self.value, str) else self.value


def read_pairs() -> list[Pair]:
    """The table."""
    rows = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return [
        Pair(
            source=row["source"],
            kind=row["kind"],
            gold=row["gold"],
            completion=row["completion"],
            right=row["accuracy"],
        )
        for row in rows
    ]


def with_dollars(pair: Pair) -> Pair:
    """The pair with a formula as gold between dollars, as math-verify's README asks; other golds stay."""
    gold = pair.gold
    if not isinstance(gold, str) or not _FORMULA.search(gold) or _MARKED.search(gold):
        return pair
    return replace(pair, gold=f"${gold}$")


def covey_verdicts(pairs: Sequence[Pair]) -> list[Verdict]:
    """The values of covey's `accuracy`; a gold that is a list is one answer."""
    from covey.rewards.accuracy import accuracy

    completions, golds = [p.completion for p in pairs], [p.gold for p in pairs]
    values = accuracy(completions=completions, solution=golds, gold_lists="all")
    return [Verdict(value=value) for value in values]


def verdicts_of(command: Sequence[str], pairs: Sequence[Pair], work: Path) -> list[Verdict]:
    """The verdicts of the script that `command PAIRS VALUES` runs. Raises SideFailed."""
    source, target = work / "pairs.jsonl", work / "values.jsonl"
    lines = [json.dumps({"gold": p.gold, "completion": p.completion}) for p in pairs]
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    done = subprocess.run(
        [*command, str(source), str(target)],
        env={**os.environ, **_OFFLINE},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SideFailed(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    if len(rows) != len(pairs):
        raise SideFailed(f"{' '.join(command)}: {len(rows)} values for {len(pairs)} pairs")
    return [
        Verdict(
            value=row["value"],
            gold=None if row["gold"] is None else tuple(row["gold"]),
            answer=None if row["answer"] is None else tuple(row["answer"]),
        )
        for row in rows
    ]
