"""How often a prompt was answered right: measured from scored completions, matched by checksum."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.data.errors import DataError
from covey.texts import tr
from covey.types import Prompt, ScoredGroup, ScorePart, Status

FILE = "pass_rates.jsonl"
NUM_BINS = 10
# Rewards whose 1 is a right answer, whatever else is paid for.
_RIGHT = ("accuracy", "accuracy_reward", "reasoning_accuracy", "reasoning_accuracy_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Of `num` completions of a prompt, `passed` passed; a pass rate without a number of completions counts
    as one completion."""

    passed: float
    num: int

    @property
    def rate(self) -> float:
        """The share that passed."""
        return self.passed / self.num

    def __add__(self, other: Tally) -> Tally:
        return Tally(passed=self.passed + other.passed, num=self.num + other.num)


def checksum(prompt: Prompt) -> str:
    """What tells a prompt from others wherever it stands: of its messages, or of its text where no template
    made it; 16 hexadecimal digits."""
    if prompt.checksum:
        return prompt.checksum
    content = prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def passes(parts: Sequence[ScorePart]) -> bool | None:
    """Whether a completion passes: an accuracy of 1, or, where none was given, 1 or more from every reward.

    None where a reward failed or none gave a value. `passes([ScorePart(name="accuracy", value=1.0),
    ScorePart(name="format", value=0.0)])` is True.
    """
    if any(p.status is not Status.OK for p in parts):
        return None
    spoke = [(p.name, p.value) for p in parts if p.value is not None]
    right = [value for name, value in spoke if name in _RIGHT]
    values = right or [value for _, value in spoke]
    return all(value >= 1.0 for value in values) if values else None


def tally(samples: Iterable[tuple[str, Sequence[ScorePart]]]) -> dict[str, Tally]:
    """The tally of each prompt, by checksum, over (checksum, parts of a completion)."""
    tallies: dict[str, Tally] = {}
    for key, parts in samples:
        passed = passes(parts)
        if passed is not None:
            tallies[key] = tallies.get(key, Tally(passed=0.0, num=0)) + Tally(passed=float(passed), num=1)
    return tallies


def lines_of(name: str, groups: Sequence[ScoredGroup]) -> Iterator[dict[str, Any]]:
    """The lines of a pass_rates.jsonl for the groups of a set; a prompt that no reward judged has none.

    `{"set": "split", "prompt_id": 7, "task": "", "checksum": "0f…", "pass_rate": 0.25, "samples": 4}`.
    """
    for scored in groups:
        prompt = scored.group.prompt
        key = checksum(prompt)
        measured = tally((key, score.parts) for score in scored.scores).get(key)
        if measured is not None:
            about = {"set": name, "prompt_id": prompt.id, "task": prompt.task, "checksum": key}
            yield {**about, "pass_rate": measured.rate, "samples": measured.num}


def tallies_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Tally]:
    """The tally of each prompt from such lines; those of one prompt are added up. DataError names a line."""
    tallies: dict[str, Tally] = {}
    for number, line in enumerate(lines, start=1):
        key, rate, num = line.get("checksum"), rate_of(line.get("pass_rate")), line.get("samples", 1)
        if not isinstance(key, str) or rate is None or not isinstance(num, int) or num < 1:
            raise DataError(
                tr(
                    "line {number} needs a checksum, a pass_rate from 0 to 1, and samples above 0",
                    number=number,
                )
            )
        tallies[key] = tallies.get(key, Tally(passed=0.0, num=0)) + Tally(passed=rate * num, num=num)
    return tallies


def rate_of(value: Any) -> float | None:
    """The pass rate that a value is; None where it is no number from 0 to 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and 0 <= value <= 1 else None


def digest(tallies: Mapping[str, Tally]) -> str:
    """A checksum of what was measured, in whatever order it stands in its file."""
    rates = sorted((key, t.rate) for key, t in tallies.items())
    return hashlib.sha256(json.dumps(rates).encode()).hexdigest()[:16]


def bin_of(rate: float) -> int:
    """The tenth that a pass rate lies in: 0 for [0, 0.1), 9 for [0.9, 1]."""
    # 0.3 * 10 may come out below 3.
    return min(int(rate * NUM_BINS + 1e-9), NUM_BINS - 1)


def levels(curriculum: str, rates: Iterable[float | None]) -> tuple[int, ...]:
    """The levels of an order by pass rate (`Order.levels`), none without a curriculum; a prompt without a
    pass rate stands in the middle."""
    if curriculum == "none":
        return ()
    bins = [bin_of(0.5 if rate is None else rate) for rate in rates]
    return tuple(NUM_BINS - 1 - b if curriculum == "easy_to_hard" else b for b in bins)
