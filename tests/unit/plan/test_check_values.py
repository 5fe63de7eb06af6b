"""Values out of range, pairs that contradict each other, mixing and streaming."""

from typing import Any

import pytest

from support.checks import Case, assert_fixes_mend, assert_says, edits_of, facts, found, one

# What must hold beside an option for nothing else to be wrong.
BESIDE: dict[str, dict[str, Any]] = {
    "early_stopping_patience": {"val_dataset": ["v.jsonl"]},
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("lora_dropout", 1),
        ("lora_dropout", -0.1),
        ("split_dataset_ratio", 1),
        ("split_dataset_ratio", -0.1),
        ("reward_timeout_s", 0),
        ("reward_workers", 0),
        ("max_bad_gold", 1.5),
        ("max_bad_gold", -0.5),
        ("cosine_max_len", 0),
        ("repetition_n_grams", 0),
        ("repetition_max_penalty", 0),
        ("repetition_max_penalty", 1),
        ("soft_max_length", 0),
        ("soft_cache_length", -1),
        ("eval_steps", 0),
        ("num_generations_eval", 0),
        ("eval_temperature", -0.5),
        ("early_stopping_patience", 0),
        ("max_minutes", 0),
        ("log_completions", -1),
        ("max_length", 0),
        ("max_completion_length", 0),
        ("epsilon", 0),
        ("epsilon", -0.1),
        ("epsilon_high", 0),
        ("delta", 0),
        ("beta", -0.1),
        ("learning_rate", -1e-6),
        ("warmup_steps", -1),
        ("warmup_ratio", 1.5),
        ("adam_beta1", 1),
        ("adam_beta2", -0.1),
        ("adam_epsilon", 0),
        ("weight_decay", -1),
        ("max_grad_norm", -1),
        ("num_train_epochs", 0),
        ("max_steps", 0),
        ("max_steps", -2),
        ("stop_after_steps", 0),
        ("seed", -1),
        ("ref_model_sync_steps", 0),
        ("ref_model_mixup_alpha", 0),
        ("ref_model_mixup_alpha", 1.01),
        ("seed", 2**63),
        ("data_seed", -1),
        ("nproc_per_node", 0),
        ("save_steps", 0),
        ("save_total_limit", 0),
        ("keep_trainer_state", -1),
        ("logging_steps", 0),
        ("rollout_log", 0),
        ("rollout_log_max_gb", 0),
    ],
)
def test_ranges(option: str, value: Any) -> None:
    beside = BESIDE.get(option, {})
    (problem,) = (p for p in found(**{**beside, option: value}) if p.code == "E109")
    assert (problem.code, problem.option) == ("E109", option)
    assert f"{option} is {value}" in problem.seen.replace(".0;", ";")
    (fix,) = problem.fixes
    assert found(**{**beside, option: fix.edits[option]}) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_bad_gold", 1.0),
        ("max_bad_gold", 0.0),
        ("ref_model_mixup_alpha", 1.0),
        ("ref_model_sync_steps", 1),
        ("lora_dropout", 0.99),
        ("eval_temperature", 0.0),
        ("log_completions", 0),
        ("keep_trainer_state", 0),
        ("max_minutes", 0.5),
        ("warmup_steps", 0),
        ("seed", 2**63 - 1),
        ("max_grad_norm", 0),
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
    problems = found(facts(num_prompts=None), streaming=True, split_dataset_ratio=0.1, interleave_prob=[1.0])
    assert [(p.code, p.option) for p in problems] == [
        ("E115", "streaming"),
        ("E111", "interleave_prob"),
        ("E111", "split_dataset_ratio"),
    ]
    assert all({"streaming": False} in edits_of(p) for p in problems)
