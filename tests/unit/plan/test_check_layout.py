"""Parts of a layout that cannot be together, and that what is offered instead can."""

from dataclasses import replace

import pytest

from covey.checks.run.look import run_facts
from covey.plan.check_layout import layout_problems
from covey.plan.layout import Layout
from covey.types import Problem
from support.checks import changed, config, facts, found
from support.layouts import EIGHT, OFFLOADED, SHARDED, elsewhere, typed_on

COLOCATED = replace(OFFLOADED, engine="colocate", engine_share=0.4, engine_parallel=4)

HERE = Layout(num_gpus=4, gpu_bytes=0, is_here=True, engine="colocate", engine_parallel=2)


def problem(layout: Layout) -> Problem:
    (one,) = layout_problems(config(), elsewhere(layout))
    return one


CASES = [
    ("E213", "deepspeed", replace(OFFLOADED, zero_stage=2)),
    ("E213", "deepspeed", replace(OFFLOADED, zero_stage=0)),
    ("E213", "deepspeed", replace(EIGHT, offload="optimizer")),
    ("E214", "vllm_tensor_parallel_size", replace(COLOCATED, engine_parallel=3)),
    ("E214", "vllm_tensor_parallel_size", replace(COLOCATED, engine_parallel=16)),
    # 16 GPUs have room for an engine of 16, of which 40 heads are no multiple.
    ("E214", "vllm_tensor_parallel_size", replace(COLOCATED, num_gpus=16, engine_parallel=16)),
    # A machine has 4 of 16 GPUs.
    ("E214", "vllm_tensor_parallel_size", replace(COLOCATED, num_gpus=16, machine_gpus=4, engine_parallel=8)),
    # 5 divides 40 heads, but not 8 heads of keys.
    ("E214", "vllm_tensor_parallel_size", replace(COLOCATED, num_gpus=10, engine_parallel=5)),
    # Processes of this machine's CPU.
    ("E214", "vllm_tensor_parallel_size", replace(HERE, num_gpus=3)),
    ("E214", "vllm_tensor_parallel_size", replace(HERE, num_gpus=1)),
    ("E215", "vllm_gpu_memory_utilization", replace(COLOCATED, engine_parallel=1)),
    ("E215", "vllm_gpu_memory_utilization", replace(COLOCATED, engine_share=0.1)),
]


@pytest.mark.parametrize(("code", "option", "layout"), CASES)
def test_what_cannot_be_together(code: str, option: str, layout: Layout) -> None:
    found = problem(layout)
    assert (found.code, found.option) == (code, option)
    assert found.seen and found.why and found.fixes
    edits = [dict(fix.edits) for fix in found.fixes if fix.edits]
    for edit in edits:
        assert layout_problems(config(), elsewhere(typed_on(layout, edit))) == [], edit


@pytest.mark.parametrize(
    "layout",
    [
        EIGHT,
        SHARDED,
        OFFLOADED,
        COLOCATED,
        replace(SHARDED, offload="optimizer"),
        replace(EIGHT, zero_stage=1, offload="optimizer"),
        replace(COLOCATED, engine="server", engine_parallel=3),
        replace(COLOCATED, num_gpus=16, machine_gpus=8, engine_parallel=8),
        HERE,
    ],
)
def test_what_can(layout: Layout) -> None:
    assert layout_problems(config(), elsewhere(layout)) == []


def test_weights_that_no_share_has_room_for() -> None:
    """Of 65.5 GB of weights an engine on one GPU of 66 GB has no room for a cache: more GPUs an engine."""
    one = problem(replace(COLOCATED, gpu_bytes=66 * 10**9, engine_parallel=1, engine_share=0.9))
    assert (one.code, [dict(fix.edits) for fix in one.fixes]) == ("E215", [{}])
    assert "--vllm_tensor_parallel_size" in one.fixes[0].text


def test_nothing_is_said_of_this_machine() -> None:
    assert layout_problems(config(), facts()) == []


def test_of_what_cannot_be_together_there_is_no_forecast() -> None:
    """Neither E211 nor a warning beside it, though the whole model is far too large."""
    given = elsewhere(replace(EIGHT, offload="optimizer"), machine={"nproc_available": 8})
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "generation_batch_size": 64}
    assert [p.code for p in found(given, **options)] == ["E213"]
    assert config(**options).max_completion_length == 1024


def test_a_machine_of_ascend_npus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not trained on its CPU without a word; a machine that is planned, and one with GPUs, are let be."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    npus = run_facts(config(), 1).machine.npu
    assert npus == "ASCEND_RT_VISIBLE_DEVICES"
    (one,) = layout_problems(config(), facts(machine={"npu": npus, "cuda": False}))
    assert one.code == "E117" and npus in one.seen and f"unset {npus}" in one.fixes[0].text
    assert layout_problems(config(), facts(machine={"npu": npus, "cuda": True})) == []
    assert layout_problems(config(), changed(elsewhere(SHARDED), machine={"npu": npus})) == []


def test_a_run_that_was_to_be_on_the_cpu_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_facts(config(), 1).machine.asks_for_cpu
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    asks = {"asks_for_cpu": run_facts(config(), 1).machine.asks_for_cpu}
    (one,) = layout_problems(config(), facts(machine={**asks, "cuda": True}))
    assert one.code == "E379" and "ACCELERATE_USE_CPU" in one.seen
    assert "CUDA_VISIBLE_DEVICES=" in one.fixes[0].text
    assert layout_problems(config(), facts(machine={**asks, "cuda": False})) == []
    assert layout_problems(config(), changed(elsewhere(SHARDED), machine=asks)) == []
