"""What stands against sampling by vLLM, and the share of a GPU that it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.checks.batch import batch_plan
from covey.plan.deepspeed import states_of
from covey.plan.engine_share import with_engine_share
from covey.plan.layout import layout_of
from covey.plan.memory import memory_plan, recompute_of, training_of
from covey.plan.memory_vllm import wanted_bytes
from covey.plan.report import report_lines
from covey.plan.vllm_limits import OWNED, UNTRIED
from covey.types import Severity
from support.checks import config, facts, found
from support.layouts import EIGHT, MODEL, elsewhere

ALONE = {"use_vllm": True, "vllm_mode": "colocate"}
LIMITS = "vllm_limit_mm_per_prompt"
SHORT = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "generation_batch_size": 64}


def said(given: Any, **options: Any) -> list[tuple[str, str]]:
    """Code and option of each problem."""
    return [(p.code, p.option) for p in found(given, **{**ALONE, **options})]


def test_nothing_stands_against_the_plain_one() -> None:
    assert said(facts(machine={"cuda": False})) == []
    assert said(facts(prompts={"longest": 20}, machine={"cuda": False}), vllm_max_model_len=4096) == []


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({"vllm_data_parallel_size": 2}, {}, ("E430", "vllm_data_parallel_size")),
        ({"vllm_mode": "server"}, {}, ("E430", "vllm_mode")),
        ({"vllm_engine_kwargs": {"seed": 1, "block_size": 16}}, {}, ("E431", "vllm_engine_kwargs")),
        ({"temperature": 0.005}, {}, ("E432", "temperature")),
        ({"temperature_end": 0.009}, {}, ("E432", "temperature_end")),
        ({"eval_temperature": 0.001}, {}, ("E432", "eval_temperature")),
        ({"temperature": 2.5}, {}, ("E432", "temperature")),
        ({"vllm_max_model_len": 40}, {"prompts": {"longest": 20}}, ("E433", "vllm_max_model_len")),
        ({"vllm_max_model_len": 4096}, {"model": {"context": 2048}}, ("W108", "vllm_max_model_len")),
        ({"vllm_gpu_memory_utilization": 0.8}, {}, ("W108", "vllm_gpu_memory_utilization")),
        ({"sleep_level": 1, "vllm_enable_sleep_mode": True}, {}, ("W108", "sleep_level")),
        ({"vllm_enable_sleep_mode": True}, {}, ("W108", "vllm_enable_sleep_mode")),
        ({}, {"machine": {"cuda": True}}, ("W190", "use_vllm")),
        ({LIMITS: {"image": 2}}, {}, ("W108", LIMITS)),
        ({}, {"model": {"type": "gemma3"}}, ("E430", "use_vllm")),
        ({LIMITS: {"image": 0}}, {"data": {"sees_images": True}}, ("E430", LIMITS)),
        ({LIMITS: {"image": 2, "video": -1}}, {"data": {"sees_images": True}}, ("E430", LIMITS)),
        ({LIMITS: {"image": "2"}}, {"data": {"sees_images": True}}, ("E430", LIMITS)),
    ],
)  # fmt: skip
def test_what_stands_against_it(
    options: dict[str, Any], changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    given = facts(**{"machine": {"cuda": False}, **changes})
    assert said(given, **{"max_completion_length": 32, **options}) == [expected]
    # Covey's own engine does all of it, or does not read it.
    assert not any(p.code.startswith(("E43", "W19")) for p in found(given, **options, use_vllm=False))


def test_what_is_enough_is_not_refused() -> None:
    given = facts(prompts={"longest": 20}, machine={"cuda": False})
    assert said(given, max_completion_length=32, vllm_max_model_len=52) == []
    assert said(given, eval_temperature=0.0) == [] and said(given, temperature=0.01) == []
    assert said(given, vllm_engine_kwargs={"block_size": 16}) == []
    given = facts(data={"sees_images": True}, machine={"cuda": False})
    assert said(given, **{LIMITS: {"image": 5, "video": 0}}) == said(given, **{LIMITS: {"audio": {}}}) == []


def test_engines_of_several_processes() -> None:
    """As many engines as the processes make; another number is no one's."""
    four = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "generation_batch_size": 64}
    for cuda, expected in ((False, []), (True, [("W190", "use_vllm")])):
        given = facts(launch={"num_processes": 4}, machine={"cuda": cuda})
        two_each = {**four, "vllm_tensor_parallel_size": 2}
        assert said(given, **four) == said(given, **four, vllm_data_parallel_size=4) == expected
        assert said(given, **two_each) == said(given, **two_each, vllm_data_parallel_size=2) == expected
        wrong = ("E430", "vllm_data_parallel_size")
        assert wrong in said(given, **two_each, vllm_data_parallel_size=4)
        assert wrong in said(given, **four, vllm_data_parallel_size=2)


def test_every_argument_with_an_option_is_coveys() -> None:
    assert {"max_model_len", "max_num_seqs", "tensor_parallel_size", "logprobs_mode", "dtype"} <= OWNED
    for name in OWNED:
        assert ("E431", "vllm_engine_kwargs") in said(facts(), vllm_engine_kwargs={name: 1})


def shared(gpu_gb: int, **options: Any) -> float:
    """The share that vLLM is given on eight GPUs under FSDP."""
    run = config(**ALONE, **{"fsdp": "full_shard", "max_completion_length": 1024, **options})
    states, _ = states_of(run, None, cuda=True)
    layout = layout_of(run, 8, gpu_gb * 10**9, states, is_here=False)
    given = with_engine_share(elsewhere(layout), run)
    return given.layout.engine_share


def test_the_share_is_solved() -> None:
    """Room for the weights at least; more of a small GPU; less for fewer completions; as it is typed."""
    weights = 2 * MODEL.parameters
    roomy, tight = shared(800), shared(160)
    assert roomy * 800e9 > weights and tight * 160e9 > weights
    assert tight > roomy
    assert shared(800, vllm_max_num_seqs=4) < roomy
    assert shared(800, vllm_gpu_memory_utilization=0.35) == 0.35


def test_the_share_leaves_the_training_its_part() -> None:
    run = config(**ALONE, **SHORT, fsdp="full_shard", max_completion_length=1024, vllm_max_num_seqs=128)
    states, _ = states_of(run, None, cuda=True)
    shares = []
    for gpu in (220, 300):
        layout = layout_of(run, 8, gpu * 10**9, states, is_here=False)
        given = elsewhere(layout)
        solved = with_engine_share(given, run)
        more = replace(solved, layout=replace(solved.layout, engine_share=solved.layout.engine_share + 0.05))
        how = training_of(run, solved, recompute_of(run, solved))
        wanted = wanted_bytes(run, layout, how, MODEL, 512 + 1024, 64)
        # Another twentieth is not needed, or does not fit.
        is_enough = solved.layout.engine_bytes >= wanted
        assert memory_plan(run, solved).share <= 0.9
        assert is_enough or memory_plan(run, more).share > 0.9
        shares.append(is_enough)
    assert set(shares) == {False, True}, "both are tried"


def test_the_plan_says_that_it_is_untried() -> None:
    run = config(**ALONE, **SHORT)
    given = elsewhere(replace(EIGHT, engine="colocate"))
    lines = "\n".join(report_lines(run, given, batch_plan(run, 8)))
    assert UNTRIED in lines and "chosen by covey (vllm_gpu_memory_utilization is not set)" in lines
    typed = report_lines(config(**ALONE, **SHORT, vllm_gpu_memory_utilization=0.3), given, batch_plan(run, 8))
    assert "chosen by covey (vllm_gpu_memory_utilization is not set)" not in "\n".join(typed)
    assert all(p.severity is Severity.WARNING for p in found(facts(machine={"cuda": True}), **ALONE))
