"""What the tasks of the rows say against task_column and task_rewards."""

from __future__ import annotations

import pytest

from covey.checks.evaluation.judge import metric_names
from covey.plan.facts import PassRateFacts
from support.checks import Case, assert_fixes_mend, assert_says, config, edits_of, facts, found, one

TWO = {"math": 600, "chat": 400}
REWARDS = {"reward_funcs": ["accuracy", "judge.py:kind"]}
NAMES = ("accuracy", "kind")
COLUMN = {**REWARDS, "task_column": "task"}
BOTH = {"math": ["accuracy"], "chat": ["kind"]}
THERE = facts(
    tasks={"num_rows": TWO}, rewards={"names": NAMES}, data={"columns": ("prompt", "solution", "task")}
)


def given(**tasks: list[str]) -> dict[str, object]:
    return {**COLUMN, "task_rewards": tasks}


CASES = [
    Case(code="E347", option="task_rewards", words="judge.py:kind scores no task", facts=THERE,
         options=given(math=["accuracy"], chat=["accuracy"])),
    Case(code="W128", option="task_column", words="No rows are left of these tasks: chat", options=COLUMN,
         facts=facts(tasks={"num_rows": {"math": 600, "chat": 0}})),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_a_good_run_of_two_tasks() -> None:
    assert found(THERE, **COLUMN) == []
    assert found(THERE, **given(**BOTH)) == []
    assert found(THERE, **given(math=["accuracy", "judge.py:kind"], chat=["judge.py:kind"])) == []


def test_a_task_that_only_the_evaluation_has_needs_an_entry_too() -> None:
    more = facts(tasks={"num_rows": TWO, "evaluated": ("code", "math")}, rewards={"names": NAMES})
    problem = one(more, **given(**BOTH))
    assert "task_rewards has no entry for the task code," in problem.seen
    assert found(more, **given(code=["kind"], **BOTH)) == []


def test_a_misspelt_task_is_said_once_with_the_nearest() -> None:
    problem = one(THERE, **given(math=["accuracy"], chta=["kind"]))
    assert edits_of(problem)[0] == {"task_rewards": {"math": ["accuracy"], "chat": ["kind"]}}


def test_a_reward_that_waits_for_a_task_is_offered_to_it() -> None:
    problem = one(THERE, **given(math=["accuracy"]))
    assert edits_of(problem) == [{"task_rewards": {"math": ["accuracy"], "chat": ["judge.py:kind"]}}]


def test_rewards_that_nobody_loaded_are_called_as_their_functions() -> None:
    assert found(facts(tasks={"num_rows": TWO}), **given(**BOTH)) == []


def test_metrics_of_tasks_may_be_the_best_metric() -> None:
    names = metric_names(config(**COLUMN), facts(tasks={"evaluated": ("math",)}, rewards={"names": NAMES}))
    assert {"eval_tasks/math/reward", "eval_tasks/math/rewards/accuracy/mean"} <= {*names}
    assert "eval_tasks/math/completions/mean_length" in names


# -- pass rates --------------------------------------------------------------------------------------------

FILE = {"pass_rates": "rates.jsonl", "min_pass_rate": 0.1}
RATED = PassRateFacts(
    where="rates.jsonl",
    digest="a",
    num_rows=1000,
    num_measured=900,
    num_kept=800,
    histogram=(200, 0, 0, 0, 0, 0, 0, 0, 0, 700),
)


def test_a_good_filter() -> None:
    assert found(facts(data={"pass_rates": RATED}, prompts={"num_used": 800}), **FILE) == []
    assert found(facts(data={"pass_rates": RATED}), pass_rates="rates.jsonl", curriculum="easy_to_hard") == []


def test_an_empty_set_shows_the_histogram_and_nothing_else() -> None:
    none = PassRateFacts(
        where="rates.jsonl",
        num_rows=9,
        num_measured=9,
        histogram=(2, 0, 0, 0, 0, 0, 0, 0, 0, 7),
    )
    problem = one(facts(data={"pass_rates": none}, prompts={"num_used": 0}), **FILE)
    assert problem.code == "E349"
    assert "Rows by pass rate: 0.0-0.1: 2, 0.9-1.0: 7" in problem.seen


@pytest.mark.parametrize(("measured", "is_said"), [(0, True), (499, True), (500, False), (1000, False)])
def test_under_half_of_the_rows(measured: int, is_said: bool) -> None:
    rates = PassRateFacts(where="rates.jsonl", num_rows=1000, num_measured=measured, num_kept=1000)
    problems = found(facts(data={"pass_rates": rates}), **FILE)
    assert [p.code for p in problems] == (["W127"] if is_said else [])
    if is_said:
        assert f"for {measured} of 1,000 prompts ({measured / 1000:.0%})" in problems[0].seen


def test_a_measurement_without_use_is_a_word() -> None:
    problem = one(facts(data={"pass_rates": RATED}), pass_rates="rates.jsonl")
    assert (problem.code, problem.option) == ("W108", "pass_rates")
