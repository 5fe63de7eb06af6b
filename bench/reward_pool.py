"""How long the workers take to score 1,000 completions: `python bench/reward_pool.py`.

A cheap function of a file, one that waits, `code_reward` with five tests a program: programs that end, and
the same with one in fifty that never does; and `accuracy` of formulas, 40 % of them right and written in
another way than the gold. No model, no GPU. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.rewards.protocol import Scored, TrainerState
from covey.rewards.reward_set import RewardSet
from covey.rewards.sandbox.layers import Isolation, isolate
from covey.types import (
    Completion,
    Episode,
    EpisodeId,
    Finish,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Status,
    TokenSequence,
)
from covey.types.arrays import floats, ints

GROUP = 8
TESTS = [{"input": f"{n} {n + 1}\n", "output": f"{2 * n + 1}\n"} for n in range(5)]
RIGHT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
PROGRAMS = (
    RIGHT,
    "```python\nprint(sum(int(word) for word in input().split()) + 1)\n```",
    "```python\nimport sys, collections, heapq\nprint(sum(map(int, sys.stdin.read().split())))\n```",
    "```python\nprint(undefined)\n```",
    "I do not know.",
)
ENDLESS = "```python\nwhile True:\n    pass\n```"
FUNCTIONS = """
import time

def cheap(completions, **kwargs):
    return [len(text) / 100 for text in completions]

def slow(completions, **kwargs):
    time.sleep(0.01 * len(completions))
    return [len(text) / 100 for text in completions]
"""


def main() -> int:
    """Time every reward and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="completions (1000)")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="the cores, at most 8"
    )
    arguments = parser.parse_args()
    isolation = isolate()
    endings = [PROGRAMS[n % len(PROGRAMS)] for n in range(arguments.count)]
    loops = [ENDLESS if n % 50 == 0 else text for n, text in enumerate(endings)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(FUNCTIONS, encoding="utf-8")
        cases = [
            ("a cheap function", f"{file}:cheap", endings),
            ("one that waits 10 ms a completion", f"{file}:slow", endings),
            ("code_reward, 5 tests", "code_reward", endings),
            ("code_reward, 5 tests, 2 % never end", "code_reward", loops),
        ]
        rows = [(name, *timed(entry, texts, arguments.workers)) for name, entry, texts in cases]
    golds, answers = formulas(arguments.count)
    rows.append(("accuracy of formulas", *timed("accuracy", answers, arguments.workers, golds)))
    sys.stdout.write(table(rows, arguments.count, arguments.workers, isolation))
    return 0


def formulas(count: int) -> tuple[list[str], list[str]]:
    """Golds, one for each group, and boxed answers after a few hundred words."""
    draw = random.Random(1)

    def formula() -> str:
        a, b, c = (draw.randint(2, 30) for _ in range(3))
        kinds = (
            rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}",
            rf"{a}\pi+{b}",
            rf"x^2+{a}x-{b}",
            rf"\frac{{{a}x+{b}}}{{{c}x-1}}",
            rf"{a}\sqrt{{{b}}}-\sqrt{{{c}}}",
            rf"\log_{{{b}}} {c}",
            rf"\sin({a}x)+{b}",
            rf"\left(\frac{{{a}}}{{{b}}}, {c}\sqrt{{2}}\right)",
        )
        return draw.choice(kinds)

    golds = [g for g in (formula() for _ in range(-(-count // GROUP))) for _ in range(GROUP)][:count]
    found = [draw.choice((f"{g}+0", f"0+{g}")) if draw.random() < 0.4 else formula() for g in golds]
    thoughts = "<think>" + "We compute $x=3$ and then go on. " * 80 + "</think>"
    return golds, [rf"{thoughts}So it is \boxed{{{answer}}}." for answer in found]


def timed(
    entry: str, texts: Sequence[str], workers: int, golds: Sequence[str] | None = None
) -> tuple[float, float]:
    """Seconds for all completions, workers warm; and the mean of the scores."""
    options = {"unsafe_exec": False, "reward_timeout_s": 60.0}
    rows = [scored(n, text, golds[n] if golds else None) for n, text in enumerate(texts)]
    with RewardSet.start([entry], workers=workers, options=options) as rewards:
        if rewards.faults:
            raise SystemExit(f"{entry}: {rewards.faults[0].words}")
        warm = (
            rows[: workers * GROUP]
            if golds is None
            else [scored(0, rf"\boxed{{{n}+x}}", f"x+{n}") for n in range(workers)]
        )
        rewards.score(warm, TrainerState())
        started = time.perf_counter()
        judged = rewards.score(rows, TrainerState())
        took_s = time.perf_counter() - started
    parts = [row.parts[0] for row in judged.rows]
    if any(part.status is not Status.OK or part.value is None for part in parts):
        raise SystemExit(f"{entry}: {next(p for p in parts if p.status is not Status.OK).message}")
    return took_s, sum(part.value or 0.0 for part in parts) / len(parts)


def scored(number: int, text: str, gold: str | None = None) -> Scored:
    """A completion with tests of a sum, or with its gold."""
    columns: dict[str, Any] = {"verification_info": {"language": "python", "test_cases": TESTS}}
    if gold is not None:
        columns = {"solution": gold}
    prompt = Prompt(
        id=number // GROUP,
        messages=None,
        opened="",
        text="Add two numbers.",
        token_ids=(1,),
        columns=columns,
        origin=Origin(epoch=0, rollout=0),
    )
    turn = Completion(
        request_id=0,
        token_ids=ints([2]),
        logprobs=floats([-1.0]),
        versions=((0, 1),),
        finish=Finish.STOP,
        seconds=0.0,
    )
    episode = Episode(
        id=EpisodeId(
            seed=0, split="bench", rollout=0, attempt=0, prompt_id=number // GROUP, sibling=number % GROUP
        ),
        sequences=(TokenSequence.of_turn(prompt.token_ids, turn),),
        outcome=Outcome.SCORED,
        text=text,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=()),
    )
    return Scored(prompt=prompt, episode=episode)


def table(rows: Sequence[tuple[str, float, float]], count: int, workers: int, isolation: Isolation) -> str:
    """The rows as text."""
    lines = [
        f"{count:,} completions in groups of {GROUP}, {workers} workers, {os.cpu_count()} cores",
        *isolation.words(),
        f"{'reward':<38}{'seconds':>9}{'a second':>10}{'mean':>7}",
        *(f"{name:<38}{took:>9.2f}{count / took:>10,.0f}{mean:>7.2f}" for name, took, mean in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
