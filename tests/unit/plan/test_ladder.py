"""The layouts next to a planned one: what they are, that each is what its words make, and which is named."""

from dataclasses import replace
from typing import Any

import pytest

from covey.plan.facts import Facts
from covey.plan.ladder import Ladder, Rung, ladder, ladder_fixes
from covey.plan.layout import THIS_MACHINE, Layout, deepspeed_word
from covey.plan.memory import memory_plan
from covey.plan.problem import START_ANYWAY
from support.checks import changed, config, found
from support.layouts import EIGHT, FIELDS, GIB, OFFLOADED, SHARDED, SHORT, STATES, elsewhere, typed_on

OPTIONS: dict[str, Any] = {**SHORT, "steps_per_generation": 1}
TYPED = ("generation_batch_size", "gradient_accumulation_steps")


def around(layout: Layout, **options: Any) -> Ladder:
    run = {**OPTIONS, **options}
    found = ladder(config(**run), elsewhere(layout), set(run))
    assert found is not None
    return found


def as_typed(rung: Rung, layout: Layout, **options: Any) -> int:
    """The bytes of the layout that the words of a rung make."""
    edits = {n: v for n, v in rung.typed.items() if n not in (*FIELDS, *STATES)}
    given = elsewhere(typed_on(layout, rung.typed))
    run = config(**{**OPTIONS, **options})
    if "quant_bits" in edits:
        edits["quant_method"] = "bnb"
    changed = run.model_copy(update=edits)
    if "per_device_train_batch_size" in edits:
        each = 8 * changed.per_device_train_batch_size
        changed = changed.model_copy(update={"steps_per_generation": changed.generation_batch_size // each})
    return memory_plan(changed, given).needed_bytes


@pytest.mark.parametrize(
    "layout",
    [
        EIGHT,
        SHARDED,
        OFFLOADED,
        replace(OFFLOADED, engine="colocate"),
        replace(SHARDED, fsdp=True),
        replace(SHARDED, fsdp=True, shard_gpus=4),
    ],
)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "selective"}, {"torch_dtype": "float32"}])
def test_each_rung_is_what_its_words_make(layout: Layout, options: dict[str, Any]) -> None:
    got = around(layout, **options)
    assert got.here.typed == {} and got.down
    for rung in (*got.up, *got.down, *([got.smallest] if got.smallest else [])):
        assert rung.typed
        assert rung.peak_bytes == as_typed(rung, layout, **options), rung.typed


def test_32_billion_parameters_whole_on_each_gpu() -> None:
    """Of the changes of one thing, offloading the optimizer of ZeRO-3 is the first that fits: the cache is
    let go before the update, and stage 2 holds the model in float32 on each GPU while it loads."""
    got = around(EIGHT, max_completion_length=2048)
    assert not got.here.fits and got.here.binding == "update"
    assert got.smallest is not None
    assert got.smallest.typed == {"deepspeed": deepspeed_word(3, "optimizer")}
    assert got.up == ()
    # ZeRO-1 is run as ZeRO-2 in bfloat16.
    stages = [r for r in got.down if r.typed.get("deepspeed") in ("zero1", "zero2", "zero3")]
    assert [r.typed["deepspeed"] for r in stages] == ["zero2", "zero3"]
    peaks = [got.here.peak_bytes, *(r.peak_bytes for r in stages)]
    assert peaks == sorted(peaks, reverse=True)
    assert {"fsdp": "full_shard"} in [r.typed for r in got.down]
    assert any("the smallest change that fits: --deepspeed" in line for line in got.in_words())


def test_words_of_fsdp() -> None:
    got = around(replace(SHARDED, fsdp=True))
    states = [dict(r.typed) for r in (*got.up, *got.down) if {*r.typed} & {*STATES}]
    assert {"fsdp": "shard_grad_op"} in states and {"fsdp_offload": True} in states
    assert not any("deepspeed" in typed for typed in states)


def test_less_sharding_is_tried_first() -> None:
    """On GPUs of 300 GiB stage 2 is enough, and costs less than stage 3."""
    large = replace(EIGHT, gpu_bytes=300 * GIB)
    smallest = around(large).smallest
    assert smallest is not None and smallest.typed == {"deepspeed": "zero2"}


def test_the_smallest_is_the_cheapest_that_fits() -> None:
    for layout in (EIGHT, SHARDED, replace(EIGHT, gpu_bytes=200 * GIB)):
        got = around(layout)
        assert got.smallest is not None
        assert got.smallest.cost == min(r.cost for r in got.down if r.fits)


def test_two_changes_where_one_is_not_enough() -> None:
    """Activations that are all kept: computing them again leaves the states too large, and offloading leaves
    the activations."""
    got = around(EIGHT, gradient_checkpointing="false", max_completion_length=2048)
    assert not any(rung.fits for rung in got.down)
    assert got.smallest is not None and got.smallest.fits
    assert got.smallest.typed == {
        "gradient_checkpointing": "true",
        "deepspeed": deepspeed_word(3, "optimizer"),
    }


def test_nothing_fits() -> None:
    got = around(replace(EIGHT, gpu_bytes=GIB))
    assert got.smallest is None
    assert got.in_words()[-1] == "no change of one or two of these fits"
    assert ladder_fixes(config(**OPTIONS), elsewhere(replace(EIGHT, gpu_bytes=GIB)), None, GIB) == ()


def test_what_fits_needs_no_change_and_has_faster_ones_above() -> None:
    got = around(OFFLOADED)
    assert got.here.fits and got.smallest is None
    assert {"deepspeed": "zero2_offload"} in [r.typed for r in got.up]
    assert got.in_words()[-1] == "the plan fits as it is"
    assert all(r.cost < 0 for r in got.up) and all(r.cost > 0 for r in got.down)


def test_the_share_of_an_engine_and_its_sleep() -> None:
    got = around(replace(OFFLOADED, engine="colocate", engine_share=0.4))
    down, up = [r.typed for r in got.down], [r.typed for r in got.up]
    assert {"vllm_gpu_memory_utilization": 0.3} in down
    assert {"vllm_enable_sleep_mode": True} in down
    assert {"vllm_gpu_memory_utilization": 0.5} in up


def test_kinds_that_are_what_they_can_be_have_no_rung() -> None:
    got = around(SHARDED, tuner_type="lora", gradient_checkpointing="true", torch_dtype="bfloat16")
    names = {name for r in got.down for name in r.typed}
    assert not names & {"tuner_type", "gradient_checkpointing", "torch_dtype"}
    assert {"gradient_checkpointing": "selective"} in [r.typed for r in got.up] or {
        "gradient_checkpointing": "false"
    } in [r.typed for r in got.up]


def test_float32_is_the_first_to_go() -> None:
    assert around(EIGHT, torch_dtype="float32").down[0].typed == {"torch_dtype": "bfloat16"}


def test_this_machine_has_rungs_of_the_options_alone() -> None:
    here: Facts = changed(
        elsewhere(EIGHT),
        layout=THIS_MACHINE,
        launch={"num_processes": 1},
        machine={"free_memory_bytes": 10**12},
    )
    got = ladder(config(gradient_checkpointing="false"), here)
    assert got is not None
    assert {name for r in got.down for name in r.typed} >= {"tuner_type", "gradient_checkpointing"}
    assert not any(name.startswith("plan_") for r in (*got.up, *got.down) for name in r.typed)
    assert ladder(config(), changed(here, machine={"free_memory_bytes": None})) is None


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    options = {**OPTIONS, "max_completion_length": 2048}
    (problem,) = found(elsewhere(EIGHT), **options)
    assert problem.code == "E211"
    assert (
        "With DDP (ZeRO-0), each process takes" in problem.seen and "for model states alone" in problem.seen
    )
    assert dict(problem.fixes[0].edits) == {"deepspeed": deepspeed_word(3, "optimizer")}
    assert problem.fixes[-1] == START_ANYWAY
    for fix in problem.fixes[:-1]:
        changed = elsewhere(typed_on(EIGHT, fix.edits))
        assert memory_plan(config(**options), changed).fits
        assert found(changed, **options) == []
