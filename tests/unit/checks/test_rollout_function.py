"""Rollout functions: what stands against them, and options that they leave no place for."""

from __future__ import annotations

from typing import Any

import pytest

from covey.checks.judge import checks
from covey.plan.layout import Layout
from covey.types.turns import ToolFault
from support.checks import BASE, Case, assert_fixes_mend, assert_says, config, facts, found

FUNCTION = {"rollout_func": "r.py:play"}
TENSOR = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}
CASES = (
    *(
        Case(
            code="E390",
            option="rollout_func",
            words="r.py:play: it is wrong.",
            facts=facts(tools={"rollout_func": ToolFault(entry="r.py:play", kind=kind, words="it is wrong")}),
            options=FUNCTION,
        )
        for kind in ("missing", "import", "signature")
    ),
    Case(
        code="E398",
        option="tools",
        words="rollout_func and tools are both set",
        options={**FUNCTION, "tools": ["t.py:add"]},
    ),
    Case(
        code="E398",
        option="environment_factory",
        words="rollout_func and environment_factory are both set",
        options={**FUNCTION, "environment_factory": "e.py:Sums"},
    ),
    Case(
        code="E398",
        option="rollout_func",
        words="the prompts have images",
        facts=facts(prompts={"has_images": True}),
        options=FUNCTION,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_stands_against_a_rollout_function_is_said(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


@pytest.mark.parametrize("option", ["max_staleness", "async_generate"])
def test_it_samples_in_turn_with_training(option: str) -> None:
    ahead = {option: 1 if option == "max_staleness" else True}
    (problem,) = [p for p in found(**FUNCTION, **ahead) if p.code == "E398"]
    assert (problem.option, problem.fixes[0].edits) == (option, {"async_generate": False, "max_staleness": 0})
    assert found(**FUNCTION, **problem.fixes[0].edits) == []


def test_one_vllm_over_several_gpus_calls_it_once() -> None:
    layout = Layout(num_gpus=2, gpu_bytes=80 * 10**9, engine="colocate", engine_parallel=2)
    (problem,) = [p for p in found(facts(layout=layout), **FUNCTION, **TENSOR) if p.code == "E398"]
    assert problem.option == "vllm_tensor_parallel_size" and "one vLLM spans 2 GPUs" in problem.seen
    alone = Layout(num_gpus=2, gpu_bytes=80 * 10**9, engine="colocate", engine_parallel=1)
    assert "E398" not in {p.code for p in found(facts(layout=alone), **FUNCTION, use_vllm=True)}


def test_a_function_may_apply_the_template_itself() -> None:
    text = facts(prompts={"are_text": True})
    assert [p.code for p in found(text)] == ["W109"] and found(text, **FUNCTION) == []


@pytest.mark.parametrize("options", [{"max_turns": 3}, {"tool_timeout_s": 5.0}])
def test_options_of_turns_have_no_effect_beside_it(options: dict[str, Any]) -> None:
    typed = {**BASE, **FUNCTION, **options, "environment_starts": "differ"}
    (problem,) = checks(config(**FUNCTION, **options, environment_starts="differ"), facts(), typed)
    assert (problem.code, problem.option) == ("W108", next(iter(options)))
    assert "rollout_func itself makes the turns" in problem.seen and "environment_starts" not in problem.seen
