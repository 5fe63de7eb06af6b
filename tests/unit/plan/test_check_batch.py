"""What is said of a batch that does not fit; test_fixes.py has the ways out."""

import pytest

from support.checks import Case, assert_fixes_mend, assert_says, facts

CASES = [
    Case(code="E201", option="num_generations", words="no second completion to compare with",
         options={"num_generations": 1}),
    Case(code="E202", option="num_generations", words="64 completions per rollout",
         options={"num_generations": 7}),
    Case(code="E203", option="generation_batch_size", words="is 64",
         options={"steps_per_generation": 4, "generation_batch_size": 64}),
    Case(code="E204", option="generation_batch_size", words="not a multiple of 1 process",
         options={"generation_batch_size": 60}),
    Case(code="E205", option="steps_per_generation", words="is 3",
         options={"steps_per_generation": 3, "gradient_accumulation_steps": 2}),
    Case(code="E206", option="steps_per_generation", words="2 rollouts",
         options={"steps_per_generation": 3, "gradient_accumulation_steps": 6}),
    Case(code="E207", option="dataset", words="7 usable prompts, but one rollout needs 8",
         facts=facts(num_prompts=7)),
    Case(code="E208", option="num_iterations", words="is 0", options={"num_iterations": 0}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_messages(case: Case) -> None:
    assert_says(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fixes_mend(case: Case) -> None:
    assert_fixes_mend(case)
