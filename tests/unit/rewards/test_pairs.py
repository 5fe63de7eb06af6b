"""A table of gold, completion and the value that a teacher gives, fixed before any scorer saw it.

Where a line of the table and `accuracy` differ, the difference is meant and stands here with its reason.
"""

from __future__ import annotations

import json
from pathlib import Path

from covey.rewards.accuracy import accuracy

GOLDEN = Path(__file__).parents[2] / "golden"
ROWS = [json.loads(line) for line in (GOLDEN / "accuracy_pairs.jsonl").read_text("utf-8").splitlines()]
# What real models write, and near misses: each was scored wrongly once.
REAL = [json.loads(line) for line in (GOLDEN / "accuracy_real.jsonl").read_text("utf-8").splitlines()]
# Gold and completion: what accuracy gives, and why.
MEANT = {
    ("10^{100}", "\\boxed{(10^{50})^2}"): (0.0, "a power of a power is work that is not done"),
    ("x>1且x≠2", "\\boxed{(1,2)\\cup(2,+\\infty)}"): (0.0, "two conditions are not solved for their set"),
    ("-2；3", "\\boxed{3；-2}"): (1.0, "a list has no order, whatever stands between its members"),
    ("33", "<think>3*11 = 33. The answer is \\boxed{33}.</think>"): (
        1.0,
        "marks count in thoughts, too; reasoning_accuracy takes none of them",
    ),
    ("March 5", "<answer>5 March</answer>"): (0.0, "dates are compared as they are written"),
    ("March 5", "<answer>March 5th</answer>"): (0.0, "dates are compared as they are written"),
}


def test_the_table_is_large_and_mixed():
    values = [row["accuracy"] for row in ROWS]
    assert len(ROWS) > 1500 and len({row["source"] for row in ROWS}) >= 12
    assert min(values.count(1.0), values.count(0.0)) > 700 and values.count(None) >= 10


def differences(rows):
    completions, golds = [r["completion"] for r in rows], [r["gold"] for r in rows]
    given = accuracy(completions=completions, solution=golds, gold_lists="all")
    return {
        (str(row["gold"]), row["completion"]): value
        for row, value in zip(rows, given, strict=True)
        if value != row["accuracy"]
    }


def test_what_real_models_write_has_its_value():
    assert len(REAL) > 200
    assert differences(REAL) == {}


def test_every_pair_has_its_value_but_for_those_that_are_meant():
    assert differences(ROWS) == {pair: value for pair, (value, _) in MEANT.items()}


def test_the_page_lists_each_difference_that_is_meant():
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    section = page.partition("## Where covey differs\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MEANT)
    for (gold, completion), (value, _) in MEANT.items():
        right = next(r["accuracy"] for r in ROWS if (str(r["gold"]), r["completion"]) == (gold, completion))
        shown = " | ".join("None" if v is None else f"{v:g}" for v in (right, value))
        assert any(row.startswith(f"| `{gold}` | `{completion}` | {shown} |") for row in rows), (
            gold,
            completion,
        )
