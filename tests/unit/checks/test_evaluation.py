"""What evaluation options ask of each other and of the data."""

from typing import Any

import pytest

from covey.checks.evaluation.judge import metric_names
from covey.plan.facts import EvalSet, Facts
from support.checks import Case, assert_fixes_mend, assert_says, config, edits_of, facts, found, one

VAL = {"val_dataset": ["v.jsonl"]}
SETS = facts(
    data={"eval_sets": (EvalSet(name="gsm8k", num_prompts=50), EvalSet(name="math", num_prompts=20))}
)
ONE = facts(data={"eval_sets": (EvalSet(name="gsm8k", num_prompts=50),)})

CASES = [
    Case(code="E115", option="eval_strategy", words="there is no evaluation dataset",
         options={"eval_strategy": "steps", "streaming": True, "max_steps": 5}),
    Case(code="E115", option="eval_strategy", words="there is no evaluation dataset",
         options={"eval_strategy": "steps", "load_best_model_at_end": True}),
    Case(code="E115", option="early_stopping_patience", words="nothing is evaluated",
         options={**VAL, "eval_strategy": "no", "early_stopping_patience": 2}),
    Case(code="E104", option="metric_for_best_model", words="is eval_gsm_reward",
         facts=SETS,
         options={**VAL, "early_stopping_patience": 2, "metric_for_best_model": "eval_gsm_reward"}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_something_to_evaluate_on_is_enough() -> None:
    assert found(eval_strategy="steps", val_dataset=["v.jsonl"]) == []
    assert found(eval_strategy="epoch", split_dataset_ratio=0.05) == []
    assert found(split_dataset_ratio=0.05, load_best_model_at_end=True) == []


def test_both_that_need_an_evaluation_are_named() -> None:
    problems = found(load_best_model_at_end=True, early_stopping_patience=3)
    assert [p.option for p in problems] == ["load_best_model_at_end", "early_stopping_patience"]


def test_names_of_metrics() -> None:
    alone = metric_names(config(), ONE)
    assert alone == [
        "eval_reward",
        "eval_completions/mean_length",
        "eval_completions/min_length",
        "eval_completions/max_length",
        "eval_completions/mean_terminated_length",
        "eval_completions/min_terminated_length",
        "eval_completions/max_terminated_length",
        "eval_completions/clipped_ratio",
        "eval_completions/unknown_ids_ratio",
        "eval_rewards/accuracy/mean",
        "eval_rewards/accuracy/std",
    ]
    several = metric_names(config(), SETS)
    assert several[:11] == alone
    assert several[11] == "eval_gsm8k_reward"
    assert several[-1] == "eval_math_rewards/accuracy/std"
    assert len(several) == 33
    # Several completions of a prompt have a spread, and a choice.
    groups = metric_names(config(num_generations_eval=6), ONE)
    names = ("reward_std", "frac_reward_zero_std", "pass@1", "pass@2", "pass@4", "pass@6")
    assert groups == [*alone, *(f"eval_{name}" for name in names)]


def metric(name: str, given: Facts = ONE, **options: Any) -> list[str]:
    problems = found(given, **VAL, load_best_model_at_end=True, metric_for_best_model=name, **options)
    return [p.code for p in problems]


def test_metrics_that_an_evaluation_gives() -> None:
    assert metric("eval_reward") == []
    assert metric("eval_rewards/accuracy/mean") == []
    assert metric("eval_math_reward", SETS) == []
    assert metric("eval_math_reward", ONE) == ["E104"]
    assert metric("eval_rewards/format/mean") == ["E104"]
    assert metric("eval_reward_std") == ["E104"]
    assert metric("eval_reward_std", num_generations_eval=2) == []
    # Pass@k is known only once rewards are seen to be 0 or 1; a k that is never measured is known now.
    assert metric("eval_pass@4", num_generations_eval=4) == []
    assert metric("eval_math_pass@2", SETS, num_generations_eval=4) == []
    # Without a metric of its own nobody looks at the name.
    assert found(**VAL, metric_for_best_model="nonsense") == []


def test_pass_at_k_of_completions_that_are_not_sampled() -> None:
    assert metric("eval_pass@4", num_generations_eval=1) == ["E104"]
    assert metric("eval_pass@8", num_generations_eval=4) == ["E104"]


def test_the_nearest_metric() -> None:
    options = {**VAL, "load_best_model_at_end": True}
    misspelt = one(ONE, **options, metric_for_best_model="eval_rewrd")
    assert edits_of(misspelt) == [{"metric_for_best_model": "eval_reward"}, {}]
    assert "the metrics are eval_reward, eval_completions/mean_length" in misspelt.fixes[1].text
