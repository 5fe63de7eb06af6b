"""Changes that make a run fit: at most three, the least costly first, each forecast as it is typed."""

from dataclasses import replace
from typing import Any

import pytest

from covey.plan.facts import Facts
from covey.plan.fitting import MOST, fitting_fixes
from covey.plan.layout import THIS_MACHINE, deepspeed_word
from covey.plan.memory import limit_of, memory_plan
from covey.plan.problem import START_ANYWAY
from support.checks import changed, config, found
from support.layouts import EIGHT, FIELDS, GIB, SHARDED, SHORT, STATES, elsewhere, typed_on

OPTIONS: dict[str, Any] = {**SHORT, "steps_per_generation": 1}
LONG = {"max_completion_length": 2048}
OPTIMIZER_AWAY = {"deepspeed": deepspeed_word(3, "optimizer")}


def on(gib: int, typed: dict[str, Any] | None = None) -> Facts:
    """Eight GPUs of so many GiB, with a layout as it is typed."""
    return elsewhere(typed_on(replace(EIGHT, gpu_bytes=gib * GIB), typed or {}))


def offered(given: Facts, **options: Any) -> list[dict[str, Any]]:
    """What is typed for each change that is named."""
    run = {**OPTIONS, **options}
    limit = limit_of(given)
    assert limit is not None
    return [dict(fix.edits) for fix in fitting_fixes(config(**run), given, set(run), limit)]


def bytes_of(edits: dict[str, Any], given: Facts, **options: Any) -> int:
    """The bytes of a run with options typed behind its own."""
    layout = typed_on(given.layout, edits)
    run = config(**{**OPTIONS, **options})
    changed = run.model_copy(update={n: v for n, v in edits.items() if n not in (*FIELDS, *STATES)})
    if "quant_bits" in edits:
        changed = changed.model_copy(update={"quant_method": "bnb"})
    if "per_device_train_batch_size" in edits:
        each = 8 * changed.per_device_train_batch_size
        changed = changed.model_copy(update={"steps_per_generation": changed.generation_batch_size // each})
    return memory_plan(changed, replace(given, layout=layout)).needed_bytes


@pytest.mark.parametrize(
    "states",
    [
        {},
        {"deepspeed": "zero2"},
        {"deepspeed": "zero3"},
        {"fsdp": "full_shard"},
        {"fsdp": "full_shard", "fsdp_offload": True},
    ],
)
@pytest.mark.parametrize("gib", [40, 80, 96, 200])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "false", **LONG}, {"beta": 0.1}])
def test_each_fits_as_it_is_typed(states: dict[str, Any], gib: int, options: dict[str, Any]) -> None:
    given, run = on(gib, states), {**options, **states}
    limit = limit_of(given)
    assert limit is not None
    ways = offered(given, **run)
    assert len(ways) <= MOST
    for edits in ways:
        assert edits and bytes_of(edits, given, **run) <= limit, edits
    if memory_plan(config(**{**OPTIONS, **run}), given).needed_bytes > limit and gib >= 96:
        assert ways


def test_32_billion_parameters_whole_on_each_gpu() -> None:
    """Offloading the optimizer of ZeRO-3 is the first that fits: stage 2 holds the model in float32 on each
    GPU while it loads. FSDP, which needs no other package, is beside it."""
    ways = offered(on(96), **LONG)
    assert ways[:2] == [OPTIMIZER_AWAY, {"fsdp": "full_shard", "fsdp_offload": True}]


def test_less_sharding_is_tried_first() -> None:
    """On GPUs of 300 GiB stage 2 is enough, and costs less than stage 3."""
    assert offered(on(300))[0] == {"deepspeed": "zero2"}


def test_two_changes_where_one_is_not_enough() -> None:
    """Activations that are all kept: computing them again leaves the states too large, and offloading leaves
    the activations."""
    kept = {"gradient_checkpointing": "false", **LONG}
    given = on(96)
    limit = limit_of(given)
    assert limit is not None
    (both,) = offered(given, **kept)
    assert both == {"gradient_checkpointing": "true", **OPTIMIZER_AWAY}
    for name, value in both.items():
        assert bytes_of({name: value}, given, **kept) > limit


def test_nothing_fits() -> None:
    assert offered(on(1)) == []


def test_fsdp_is_not_proposed_beside_a_file_of_deepspeed() -> None:
    """Each of two ways to split a model is proposed where it was typed."""
    for states, other in (({"fsdp": "full_shard"}, "deepspeed"), ({"deepspeed": "zero3"}, "fsdp")):
        ways = offered(on(80, states), gradient_checkpointing="false", **LONG, **states)
        assert ways and not any(other in edits for edits in ways)


SMALLER, ASLEEP = {"vllm_gpu_memory_utilization": 0.4}, {"vllm_enable_sleep_mode": True}


@pytest.mark.parametrize(
    ("gib", "expected"),
    [(141, [SMALLER, ASLEEP]), (120, [ASLEEP, {"vllm_gpu_memory_utilization": 0.3}])],
)
def test_an_engine_on_the_same_gpus_gives_way(gib: int, expected: list[dict[str, Any]]) -> None:
    """A tenth less of a GPU costs less than sleeping, two tenths cost more."""
    run = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 8, "fsdp": "full_shard"}
    run |= {"vllm_gpu_memory_utilization": 0.5, "gradient_checkpointing": "true"}
    layout = replace(SHARDED, gpu_bytes=gib * GIB, fsdp=True, engine="colocate", engine_parallel=8)
    assert offered(elsewhere(replace(layout, engine_share=0.5)), **run)[:2] == expected


def test_kinds_that_are_what_they_can_be_are_not_proposed() -> None:
    run = {"tuner_type": "lora", "gradient_checkpointing": "true", "torch_dtype": "bfloat16"}
    for gib in (16, 24, 40):
        names = {name for edits in offered(on(gib, {"deepspeed": "zero3"}), **run) for name in edits}
        assert not names & {"tuner_type", "gradient_checkpointing", "torch_dtype"}


def test_float32_is_the_first_to_go() -> None:
    run = {"torch_dtype": "float32", "deepspeed": "zero3_offload"}
    given = on(150, run)
    assert offered(given, **run)[0] == {"torch_dtype": "bfloat16"}


def test_this_machine_has_changes_of_the_options_alone() -> None:
    """No layout of other GPUs; each is said in words."""
    given = changed(
        elsewhere(EIGHT),
        layout=THIS_MACHINE,
        launch={"num_processes": 1},
        machine={"free_memory_bytes": 10**12},
    )
    run = config(gradient_checkpointing="false")
    fixes = fitting_fixes(run, given, None, int(0.8 * memory_plan(run, given).needed_bytes))
    assert fixes and all(fix.text for fix in fixes)
    assert not {name for fix in fixes for name in fix.edits} & {*STATES, *FIELDS}


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    options = {**OPTIONS, **LONG}
    (problem,) = found(elsewhere(EIGHT), **options)
    assert problem.code == "E211"
    assert (
        "With DDP (ZeRO-0), each process takes" in problem.seen and "for model states alone" in problem.seen
    )
    assert dict(problem.fixes[0].edits) == OPTIMIZER_AWAY
    assert problem.fixes[-1] == START_ANYWAY
    for fix in problem.fixes[:-1]:
        changed = elsewhere(typed_on(EIGHT, fix.edits))
        assert memory_plan(config(**options).model_copy(update=dict(fix.edits)), changed).fits
        assert found(changed, **{**options, **fix.edits}) == []
