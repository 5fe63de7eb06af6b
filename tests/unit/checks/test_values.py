"""Values out of range, pairs that contradict each other, mixing and streaming."""

from typing import Any

import pytest

from covey.config.values import kind_of
from covey.options.schema import FACTS
from support.checks import Case, assert_fixes_mend, assert_says, edits_of, facts, found, one


def outside(name: str) -> list[Any]:
    """Values just beyond each bound of an option, and those of `also` that are far within."""
    bounds, whole = FACTS[name].bounds, "whole number" in kind_of(name).words
    near = 1 if whole else 0.01
    found = [] if bounds.ge is None else [bounds.ge - near]
    found += [] if bounds.le is None else [bounds.le + near]
    found += [b for b in (bounds.gt, bounds.lt) if b is not None]
    return [int(value) if whole else float(value) for value in found if value not in bounds.also]


BOUNDED = [(name, value) for name, facts in FACTS.items() if facts.bounds for value in outside(name)]


@pytest.mark.parametrize(("option", "value"), BOUNDED)
def test_ranges(option: str, value: Any) -> None:
    """Refused, with a value in the range as the fix."""
    assert [p.option for p in found(**{option: value}) if p.code == "E109"] == [option]
    (problem,) = (p for p in found(**{option: value}) if p.code == "E109")
    assert f"{option} is {value if isinstance(value, int) else f'{value:g}'}" in problem.seen
    (fix,) = problem.fixes
    assert not [p for p in found(**{option: fix.edits[option]}) if p.code == "E109"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_bad_gold", 1.0), ("max_bad_gold", 0.0), ("lora_dropout", 0.99), ("eval_temperature", 0.0)),
        *(("log_completions", 0), ("keep_trainer_state", 0), ("seed", 2**63 - 1), ("max_grad_norm", 0)),
    ],
)
def test_bounds_that_belong_to_the_range(option: str, value: Any) -> None:
    assert found(**{option: value}) == []


def test_a_value_that_others_follow_is_said_once() -> None:
    assert [p.option for p in found(seed=-1)] == ["seed"]
    assert [p.option for p in found(epsilon=-0.1)] == ["epsilon"]
    assert [p.option for p in found(save_steps=0)] == ["save_steps"]
    assert [p.option for p in found(temperature=-1)] == ["temperature"]


CASES = [
    Case(code="W103", option="learning_rate", words="is 0", options={"learning_rate": 0}),
    Case(code="W104", option="delta", words="below 1 + epsilon_high = 1.28", options={"delta": 1.1}),
    Case(code="W106", option="num_iterations", words="9 optimizer steps", options={"num_iterations": 9}),
    Case(code="W106", option="num_iterations", words="16 optimizer steps",
         options={"num_iterations": 4, "steps_per_generation": 8, "gradient_accumulation_steps": 2}),
    Case(code="E109", option="interleave_prob", words="is 1.5 -0.5 for 2 sources",
         options={"dataset": ["a", "b"], "interleave_prob": [1.5, -0.5]}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


@pytest.mark.parametrize("num", [1, 2, 3, 6, 7, 11, 30])
def test_equal_probabilities_add_up(num: int) -> None:
    dataset = [f"{i}.jsonl" for i in range(num)]
    wrong = [0.5] * num if num != 2 else [0.5, 0.4]
    (edits,) = edits_of(one(dataset=dataset, interleave_prob=wrong))
    assert len(edits["interleave_prob"]) == num
    assert found(dataset=dataset, **edits) == []
    assert max(edits["interleave_prob"]) - min(edits["interleave_prob"]) < 1e-4


def test_probabilities_written_to_six_places_are_accepted() -> None:
    assert found(dataset=["a", "b", "c"], interleave_prob=[0.333333, 0.333333, 0.333334]) == []
    assert found(dataset=["a", "b"], interleave_prob=[0.0, 1.0]) == []


def test_streaming_with_everything_in_its_way() -> None:
    problems = found(
        facts(prompts={"num_used": None}), streaming=True, split_dataset_ratio=0.1, interleave_prob=[1.0]
    )
    assert [(p.code, p.option) for p in problems] == [
        ("E115", "streaming"),
        ("E111", "interleave_prob"),
        ("E111", "split_dataset_ratio"),
    ]
    assert all({"streaming": False} in edits_of(p) for p in problems)
