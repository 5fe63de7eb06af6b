"""Refusals and warnings by the memory forecast, and that what they offer fits by the same forecast."""

from dataclasses import replace
from typing import Any

import pytest

from covey.plan.engine_share import with_engine_share
from covey.plan.facts import Facts, ModelSizes
from covey.plan.memory import memory_plan
from covey.plan.problem import START_ANYWAY
from covey.types import Problem, Severity
from support.checks import changed, config, edits_of, facts, found, one
from support.layouts import EIGHT, GIB, SHORT, elsewhere

MODEL = ModelSizes(
    family="qwen2",
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_width=64,
    intermediate=4864,
    vocabulary=151_936,
    tied=True,
    parameters=494_000_000,
    adapted=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    adapted_parameters=357_000_000,
    adapter_parameters=8_800_000,
)
GPU = facts(model={"sizes": MODEL}, machine={"free_memory_bytes": 80 * 10**9})


KEPT = {"gradient_checkpointing": "false"}
"""Activations are kept whatever they take, as `auto` would not."""


def with_share(given: Facts, share: float, **options: Any) -> Facts:
    """The facts on a machine of which the run takes this share, with what it does where memory is that
    short."""
    for _ in range(4):
        needed = memory_plan(config(**options), given).needed_bytes
        given = changed(given, machine={"free_memory_bytes": int(needed / share)})
    return given


@pytest.mark.parametrize(("share", "codes"), [(0.5, []), (0.899, []), (0.91, ["W114"]), (1.5, ["W114"])])
def test_what_is_warned_of(share: float, codes: list[str]) -> None:
    given = with_share(GPU, share, **KEPT)
    assert [p.code for p in found(given, **KEPT)] == codes


# In bfloat16 and one process, of 494 M weights: 2 bytes, and 4 + 8 of masters and moments and 4 of gradients.
STATES = 18 * 494_000_000


@pytest.mark.parametrize(("more", "code"), [(0, "W114"), (-1, "E211")])
def test_states_alone_are_what_is_refused(more: int, code: str) -> None:
    """Of whatever batch and lengths; the cache of one row is the least of a rollout."""
    given = changed(GPU, machine={"free_memory_bytes": STATES + more})
    for options in ({}, KEPT, {"max_completion_length": 4}, {"gradient_checkpointing": "true"}):
        assert one(given, **options).code == code
    row = 2 * 24 * 2 * 64 * 2 * (100 + 1024)
    rollout = {p.name: p for p in memory_plan(config(), given).phases}["rollout"]
    assert rollout.states["KV cache of one row"] == row
    # A cache that no device has room for is refused by itself.
    long = {"max_completion_length": 1_000_000, "offload_model": True, "offload_optimizer": True}
    assert "KV cache of one row" in one(changed(given, model={"context": None}), **long).seen


def test_what_is_said() -> None:
    given = with_share(GPU, 1.5, **KEPT)
    problem = one(given, **KEPT)
    assert problem.option == "per_device_train_batch_size"
    needed, free = memory_plan(config(**KEPT), given).needed_bytes, given.machine.free_memory_bytes
    assert free is not None
    assert problem.seen == (
        f"The run takes about {needed / 1e9:.4g} GB in the phase update, including Python and its libraries; "
        f"{free / 1e9:.4g} GB are free on the GPU."
    )
    assert "activations" in problem.cause and problem.why and problem.fixes
    refused = one(changed(GPU, machine={"free_memory_bytes": 8 * 10**9}))
    assert refused.option == "model"
    parts = "moments 3.952 GB, masters 1.976 GB, gradients 1.976 GB, weights 988 MB"
    assert refused.seen == (
        f"The run takes 8.892 GB for model states alone in the phase "
        f"update ({parts}); 8 GB are free on the GPU."
    )


@pytest.mark.parametrize("share", [1.0, 1.5, 2.0, 3.5])
@pytest.mark.parametrize("options", [{}, {"torch_dtype": "float32"}, {"beta": 0.04}])
@pytest.mark.parametrize("kind", ["false", "selective"])
def test_each_fix_fits(share: float, options: dict[str, Any], kind: str) -> None:
    options = {**options, "gradient_checkpointing": kind}
    given = with_share(GPU, share, **options)
    problem = one(given, **options)
    if problem.code == "E211":
        assert problem.fixes[-1] == START_ANYWAY
        (ignored,) = found(given, **options, ignore_memory_forecast=True)
        assert (ignored.code, ignored.severity, ignored.seen) == ("W150", Severity.WARNING, problem.seen)
    ways = [fix.edits for fix in problem.fixes if fix != START_ANYWAY]
    assert ways
    for edits in ways:
        assert found(given, **{**options, **edits}) == [], edits


def test_smaller_passes_are_the_same_run() -> None:
    given = with_share(GPU, 1.3, **KEPT)
    splits = [e for e in edits_of(one(given, **KEPT)) if "per_device_train_batch_size" in e]
    assert splits
    for split in splits:
        assert split["per_device_train_batch_size"] * split["gradient_accumulation_steps"] == 64


def test_smaller_passes_where_their_tokens_are_set() -> None:
    options = {**KEPT, "max_tokens_per_micro_batch": 20_000}
    edits = edits_of(one(with_share(GPU, 1.3, **options), **options))
    assert {"max_tokens_per_micro_batch": 10_000} in edits
    assert not any("per_device_train_batch_size" in e for e in edits)


def again(problem: Problem) -> list[Any]:
    """The values of gradient_checkpointing that are offered."""
    return [e["gradient_checkpointing"] for e in edits_of(problem) if "gradient_checkpointing" in e]


def test_what_is_computed_again_costs_as_little_as_fits() -> None:
    """As a user types it."""
    assert again(one(with_share(GPU, 1.0, **KEPT), **KEPT)) == ["selective"]
    assert again(one(with_share(GPU, 1.8, **KEPT), **KEPT)) == ["true"]
    selective = {"gradient_checkpointing": "selective"}
    assert again(one(with_share(GPU, 1.2, **selective), **selective)) == ["true"]
    whole = {"gradient_checkpointing": "true"}
    assert again(one(with_share(GPU, 1.2, **whole), **whole)) == []


def test_auto_has_tried_what_is_offered_otherwise() -> None:
    given = with_share(GPU, 1.5, **KEPT)
    assert one(given, **KEPT).severity is Severity.WARNING
    assert found(given) == []
    least = with_share(GPU, 1.2, gradient_checkpointing="true")
    assert again(one(least)) == []


def test_nothing_fits() -> None:
    problem = one(changed(GPU, machine={"free_memory_bytes": 10**9}))
    assert [dict(f.edits) for f in problem.fixes] == [{}, {"ignore_memory_forecast": True}]
    assert "more memory" in problem.fixes[0].text


def test_processes_of_a_cpu_add_up() -> None:
    given = changed(GPU, machine={"cuda": False, "nproc_available": 8}, launch={"num_processes": 2})
    sizes: dict[str, Any] = {"gradient_accumulation_steps": 8, "steps_per_generation": 8}
    sizes |= {"generation_batch_size": 128, **KEPT}
    problem = one(with_share(given, 1.2, **sizes), **sizes)
    assert problem.seen.startswith("2 processes take about ")
    assert problem.seen.endswith("are free on this machine.")
    states = memory_plan(config(**sizes), given).largest_states.states
    seen = one(changed(given, machine={"free_memory_bytes": 2 * sum(states.values()) - 1}), **sizes).seen
    assert seen.startswith(f"2 processes take {2 * sum(states.values()) / 1e9:.4g} GB for model states alone")
    assert " (each with moments " in seen


def test_a_faulty_batch_comes_first() -> None:
    assert [p.code for p in found(with_share(GPU, 2.0), num_generations=1)] == ["E201"]


@pytest.mark.parametrize("unknown", [{"machine": {"free_memory_bytes": None}}, {"model": {"sizes": None}}])
def test_silent_where_nothing_is_known(unknown: dict[str, Any]) -> None:
    assert found(changed(with_share(GPU, 2.0), **unknown)) == []


def test_other_engines_where_the_copy_alone_is_too_much() -> None:
    """32 B split over eight GPUs of this machine, each of 48 GiB with states offloaded: the native engine's
    copy does not fit, servers and vLLM over some of them do."""
    here = replace(EIGHT, gpu_bytes=48 * GIB, is_here=True, zero_stage=3, offload="params", fsdp=True)
    given = elsewhere(here)
    typed = {**SHORT, "steps_per_generation": 1, "fsdp": "full_shard", "fsdp_offload": True}
    (problem,) = [p for p in found(given, **typed) if p.code == "E211"]
    assert "a full copy of the weights" in problem.cause
    served, spread = edits_of(problem)[:2]
    assert served == {"use_vllm": True, "vllm_mode": "server"}
    assert "--vllm_tensor_parallel_size 4" in problem.fixes[0].text
    fields = {"engine": "colocate", "engine_parallel": spread["vllm_tensor_parallel_size"]}
    layout = replace(here, **fields, engine_sleeps=spread["vllm_enable_sleep_mode"])
    run = config(**typed, **spread)
    assert memory_plan(run, with_engine_share(replace(given, layout=layout), run)).fits
