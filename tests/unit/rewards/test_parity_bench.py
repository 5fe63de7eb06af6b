"""bench/accuracy_parity.py: it says of each side what that side did, and each difference has one cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from parity import tables
from parity.causes import CAUSES, cause_of
from parity.pairs import HERE, Pair, SideFailed, Verdict, verdicts_of, with_dollars


def pair(gold, completion, right):
    return Pair(source="math", kind="", gold=gold, completion=completion, right=right)


def read(value, gold=(), answer=None):
    return Verdict(value=value, gold=gold, answer=answer)


# A pair, what a side made of it, and why that is not the right value.
DIFFERENT = [
    (pair(72, "#### 72", 1.0), Verdict(value="TypeError"), "no text"),
    (pair("", "72", None), read(0.0), "no gold"),
    (pair("Sunday", "Sunday", 1.0), read(None), "word"),
    (pair("A, C", "AC", 1.0), read(0.0), "word"),
    (pair("\\sqrt{2}", "\\boxed{2}", 0.0), read(None), "bare"),
    (pair("\\ln 2", "\\boxed{2}", 0.0), read(1.0, ("2", "2"), ("2", "2")), "bare, in part"),
    (pair("7 kg", "I counted 7.", 1.0), read(0.0, ("7", "7"), ()), "plain"),
    (pair("7", "so $7$", 1.0), read(0.0, ("7", "7"), ()), "dollars"),
    (pair("20", "#### 19\nThe rest is 20.", 0.0), read(1.0, ("20", "20"), ("20", "20")), "place"),
    (pair("7", "<think>\\boxed{7}</think>8", 0.0), read(1.0, ("7", "7"), ("7", "7")), "thoughts"),
    (pair("64", "The answer is not 64.", 0.0), read(1.0, ("64", "64"), ("64", "64")), "one of it"),
    (pair("9 kg", "<answer>9 g</answer>", 0.0), read(1.0, ("9", "9"), ("9", "9")), "unit"),
    (pair("18", "#### $18k", 0.0), read(1.0, ("18", "18"), ("18", "18")), "scale"),
    (pair("7", "\\boxed{3+4}", 0.0), read(1.0, ("7", "7"), ("3 + 4", "3+4")), "undone"),
    (pair("7", "\\boxed{7.}", 1.0), read(0.0, ("7", "7"), ("7.",)), "notation"),
]


def test_each_kind_of_difference_has_its_cause():
    assert {cause for _, _, cause in DIFFERENT} == CAUSES.keys()
    for asked, verdict, cause in DIFFERENT:
        assert cause_of(asked, verdict) == cause, asked


def numbers(lines):
    """The cells of a table's rows, numbers as such."""
    rows = [[cell.strip("* ") for cell in line.split("|")[1:-1]] for line in list(lines)[2:]]
    return [[int(c) if c.isdigit() else c for c in row] for row in rows]


def test_the_tables_add_up():
    pairs = [p for p, _, _ in DIFFERENT] + [pair("5", "\\boxed{5}", 1.0)]
    covey = [Verdict(value=p.right) for p in pairs]
    swift = [v for _, v, _ in DIFFERENT] + [read(1.0, ("5",), ("5",))]
    sides = {"covey": covey, "swift": swift}
    *rows, right = numbers(tables.counts(pairs, sides))
    assert [sum(row[n] for row in rows) for n in (2, 3)] == [len(pairs), len(pairs)]
    assert right[1:] == [len(pairs), len(pairs), 1]
    assert sum(row[-1] for row in numbers(tables.by_source(pairs, sides))) == 1
    causes = numbers(tables.by_cause(pairs, sides))
    assert sum(row[-1] for row in causes if row[1] == "together") == len(DIFFERENT)
    assert sum(row[-1] for row in causes if row[1] != "together") == len(DIFFERENT)
    assert sum(line.startswith("  gold ") for line in tables.differences(pairs, sides)) == len(DIFFERENT)


def test_tables_are_put_below_their_marks():
    page = "a\n\n<!-- table: one -->\n| old |\n|---|\n\nb\n\n<!-- table: two -->\n\nc\n"
    written = tables.with_tables(page, {"one": ["| 1 |"], "two": ["| 2 |", "|---|"]})
    assert written == "a\n\n<!-- table: one -->\n| 1 |\n\nb\n\n<!-- table: two -->\n| 2 |\n|---|\n\nc\n"
    assert tables.with_tables(written, {"one": ["| 1 |"], "two": ["| 2 |", "|---|"]}) == written
    with pytest.raises(ValueError, match="three"):
        tables.with_tables(page, {"three": []})


def test_math_verify_is_asked_as_its_readme_and_as_trl_ask_it(tmp_path):
    """TRL takes no answer in plain text, the defaults do; neither reads a word as gold."""
    pairs = [pair("72", "It is 72", 1.0), pair("72", "\\boxed{72}", 1.0), pair("Sunday", "Sunday", 1.0)]
    script = [sys.executable, str(HERE / "on_math_verify.py")]
    readme, trl = (
        [v.value for v in verdicts_of([*script, way], pairs, tmp_path)] for way in ("readme", "trl")
    )
    assert readme == [1.0, 1.0, None] and trl == [0.0, 1.0, None]
    (verdict,) = verdicts_of([*script, "trl"], pairs[1:2], tmp_path)
    assert verdict.gold == verdict.answer == ("72", "72")


def test_a_side_that_fails_says_why(tmp_path):
    with pytest.raises(SideFailed, match="no such way"):
        verdicts_of([sys.executable, "-c", "import sys; sys.exit('no such way')"], [], tmp_path)


def test_only_formulas_are_put_between_dollars():
    golds = ["\\frac{1}{2}", "2x+1", "72", "Sunday", "x=1 or x=2", "so \\boxed{3}", 72, None]
    changed = [with_dollars(pair(gold, "", 1.0)).gold for gold in golds]
    assert changed == ["$\\frac{1}{2}$", "$2x+1$", *golds[2:]]


def test_the_short_table_is_part_of_the_long_one():
    docs = Path(__file__).parents[3] / "docs"
    short = (docs / "rewards.md").read_text(encoding="utf-8")
    short = short.partition("## Beside math-verify and ms-swift\n")[2].partition("\n## ")[0]
    rows = [line for line in short.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert set(rows) <= set((docs / "accuracy.md").read_text(encoding="utf-8").splitlines())
