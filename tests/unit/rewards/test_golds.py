r"""Golds of the kinds that data sets hold: a table of answers, golds that cannot be compared, and time.

Each line of `tests/golden/golds.jsonl` is a gold column's value, a completion and the score that a reader
gives it: 1 right, 0 wrong, null where the gold cannot be compared with anything; with `gold_lists` where that
is not "any".
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rewards.accuracy import accuracy
from covey.rewards.algebra import ALGEBRA, Algebra, is_bounded
from covey.rewards.golds import GoldReport, check_golds, gold_problem

TABLE = Path(__file__).parents[2] / "golden" / "golds.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_the_table(case):
    given = accuracy(
        completions=[case["completion"]], solution=[case["gold"]], gold_lists=case.get("gold_lists")
    )
    assert given == [case["score"]]


def test_what_the_table_holds():
    assert len({c["name"] for c in CASES}) == len(CASES) >= 80
    scores = [c["score"] for c in CASES]
    assert min(scores.count(1), scores.count(0)) > 100
    assert scores.count(None) > 10
    # Every gold that can be compared has an answer that is right and, but for a few, one that is wrong.
    by_gold: dict[str, set[int | None]] = {}
    for case in CASES:
        by_gold.setdefault(case["name"].rsplit("-", 1)[0], set()).add(case["score"])
    assert [name for name, scores in by_gold.items() if not scores & {1, None}] == []


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("She has 3.\n####", "empty"),
        (r"\boxed{}", "empty"),
        ("<answer></answer>", "empty"),
        ("?!", "no letter or digit"),
        ("( , )", "no letter or digit"),
        ("nan", "missing"),
        (r"\frac{1}{", "brace"),
        (r"\sqrt{2}}", "brace"),
        (r"\frac{1}", "two parts"),
        (r"\left(1, 2", r"\left"),
        ("3 +", "operator"),
        ("x =", "operator"),
        ("word " * 300, "1499 characters"),
        (r"\sqrt{2} \frac", "two parts"),
        (r"\int_0^1 x\,dx", "math-verify"),
        ("9^{9^{9}}", "math-verify"),
    ],
)
def test_what_is_wrong_with_a_gold(gold, why):
    said = gold_problem(gold)
    assert said is not None and why in said
    assert accuracy(completions=["<answer>1</answer>"], solution=[gold]) == [None]


@pytest.mark.parametrize(
    "gold",
    ["72", "-1/2", "50%", "Sunday", "(B)", "1, 2, 3", "星期日", r"\sqrt{2}+1", "[0, 1)", r"\emptyset", "$5"],
)
def test_nothing_is_wrong_with_a_gold(gold):
    assert gold_problem(gold) is None


def test_golds_of_a_data_set_are_checked_with_their_rows():
    golds = ["1", None, "", 4, r"\sqrt{3}+x", r"\sqrt{3", ["a", "b"], r"\int x"]
    report = check_golds(golds)
    assert (report.num_golds, report.num_checked) == (7, 7)
    assert [(row, text) for row, text, _ in report.bad] == [(2, ""), (5, r"\sqrt{3"), (7, r"\int x")]
    assert check_golds(golds) == report
    assert check_golds([]) == GoldReport(num_golds=0, num_checked=0, bad=[])


def test_without_time_the_formulas_are_left():
    report = check_golds(["1", "", "x^2+1", r"\int x"], budget_s=0.0)
    assert (report.num_golds, report.num_checked) == (4, 2)
    assert [row for row, _, _ in report.bad] == [1]


def test_ten_thousand_plain_golds_take_no_time():
    numbers = ["{}", "{}/7", "{}.5", "{}%", "${}", "so\n#### {}", "1, {}"]
    kinds = [*numbers, "Room {}", "({}, 2)", r"\frac{{{}}}{{3}}"]
    golds = [kinds[i % len(kinds)].format(i) for i in range(10_000)]
    started = time.process_time()
    report = check_golds(golds, budget_s=0.0)
    assert time.process_time() - started < 5
    assert (report.num_checked, report.bad) == (10_000, [])


def test_formulas_are_checked_within_the_budget():
    golds = [rf"\sqrt{{{i}}}+x^{{{i % 7 + 2}}}" for i in range(10_000)]
    started = time.perf_counter()
    report = check_golds(golds, budget_s=0.5)
    assert time.perf_counter() - started < 20
    assert 10 < report.num_checked < 10_000
    assert report.bad == []


HOSTILE = {
    "brackets": "(" * 900,
    "tower": "9**9**9",
    "a tower in braces": "10^{10^{10}}",
    "a power of powers": "((((9^{99})^{99})^{99})^{99})^{99}",
    "nested roots": r"\sqrt{" * 40 + "2" + "}" * 40,
    "many nested roots": r"\sqrt{" * 30_000 + "2" + "}" * 30_000,
    "nested fractions": r"\frac{1}{" * 60 + "2" + "}" * 60,
    "factorials": "((9!)!)!",
    "a binomial": r"\binom{99999}{5000}",
    "a large power": "(x+y+z+w)^{9999}",
    "a product of roots": r"(1+\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{99}",
    "a list of large powers": ", ".join(f"(x+y+z+w)^{{{n}}}" for n in range(9980, 9990)),
    "nested tuples": "(1," * 200 + "2" + ")" * 200,
    "signs": r"\pm" * 200 + "1",
    "opened boxes": "\\boxed{" * 20_000,
    "opened tags": "<answer>" * 50_000,
    "opened dollars": "$x" * 50_000,
    "an exponent": r"1\times 10^{9999}",
    "spaces": "1" + " " * 50_000 + "1",
    "digits": "9" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_and_quick(name):
    golds = ["72", r"\sqrt{2}", r"x^2+1, \sqrt{3}"]
    ALGEBRA.equal("x", "x+0")
    for form in ("{}", "<answer>{}</answer>"):
        started = time.perf_counter()
        assert accuracy(completions=[form.format(HOSTILE[name])] * 3, solution=golds) == [0.0] * 3
        assert time.perf_counter() - started < 15


@settings(max_examples=150, deadline=None, derandomize=True)
@given(gold=st.text(max_size=60), completion=st.text(max_size=120))
def test_no_text_raises(gold, completion):
    (score,) = accuracy(completions=[completion], solution=[gold])
    assert score in (0.0, 1.0, None)
    assert (score is None) == (gold_problem(gold) is not None)


FRAGMENTS = [
    *(r"\frac", r"\sqrt", "{", "}", "(", ")", "[", "]", "^", "_", "1", "23", "x", "+", "-", "=", ","),
    *("$", "%", r"\boxed{", r"\text{", "<answer>", "</answer>", "#### ", r"\pm", r"\cup", " or "),
    *("答案：", "½", "B", "!"),
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    gold=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
)
def test_no_latex_raises(gold, text):
    (score,) = accuracy(completions=["".join(text)], solution=["".join(gold)])
    assert score in (0.0, 1.0, None)


def test_a_child_that_ended_is_started_again():
    algebra = Algebra()
    assert algebra.equal("x+1", "1+x")
    (child,) = algebra._running
    child.kill()
    child.wait()
    assert algebra.equal("x+2", "2+x")
    assert not algebra.equal("x+1", "2+x")
    assert len(algebra._running) == 1
    algebra.close()
    algebra.close()
    assert algebra.parses("x+1")
    algebra.close()


def test_many_threads_ask_few_children():
    found = {}
    algebra = Algebra(2)

    def ask(n):
        found[n] = algebra.equal(f"x+{n}", f"{n}+x"), algebra.equal(f"x+{n}", f"{n + 1}+x")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(8), (True, False))
    assert 1 <= len(algebra._running) <= 2
    algebra.close()
    assert not algebra._running


@pytest.mark.parametrize(
    ("latex", "bounded"),
    [
        ("x^2+1", True),
        (r"2^{\frac{1}{2}}", True),
        ("e^{x^2}", True),
        ("2^{2024}", True),
        ("n!", True),
        ("9^{9^{9}}", False),
        ("9^9^9", False),
        ("2^{1000000}", False),
        ("((2^{999})^{999})^{999}", False),
        ("9999!", False),
        ("9!!", False),
        (r"\sum_{k=1}^{n} k", False),
        ("(" * 30, False),
        ("x+" * 600, False),
    ],
)
def test_what_math_verify_is_asked(latex, bounded):
    assert is_bounded(latex) is bounded
