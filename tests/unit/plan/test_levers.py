"""Offloading and 8-bit moments: what the forecast makes of them, what proposes and what refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.checks.judge import checks
from covey.plan.check_memory import memory_problems
from covey.plan.facts import Facts
from covey.plan.fitting import fitting_fixes
from covey.plan.layout import Layout
from covey.plan.levers import group_share
from covey.plan.memory import memory_plan
from support.checks import SIZES, changed, config, facts, found

P = 1_000_000_000
# 20 layers of 45 M weights, an embedding of 100 M.
MODEL = replace(SIZES, layers=20, hidden=1000, vocabulary=100_000, parameters=P)
GPU = facts(
    model={"sizes": MODEL, "num_parameters": P},
    prompts={"longest": 10},
    machine={"free_memory_bytes": 80 * 10**9},
)
RUN = {"max_completion_length": 16, "torch_dtype": "bfloat16", "gradient_checkpointing": "false"}


def parts(given: Facts = GPU, **options: Any) -> dict[str, dict[str, int]]:
    plan = memory_plan(config(**{**RUN, **options}), given)
    return {phase.name: dict(phase.parts) for phase in plan.phases}


def held(phases: dict[str, dict[str, int]], name: str) -> dict[str, float]:
    """Where a part is, in bytes a weight."""
    return {phase: parts[name] / P for phase, parts in phases.items() if name in parts and phase != "load"}


def test_the_state_of_the_optimizer_is_there_for_a_step_in_groups() -> None:
    phases = parts(offload_optimizer=True)
    assert held(phases, "masters") == held(phases, "moments") == {}
    # Of the embedding: a tenth of 12 bytes a weight.
    assert held(phases, "optimizer state of some layers") == {"step": 1.2}
    # 4 groups of 5 layers: 225 M weights each.
    grouped = parts(offload_optimizer=True, move_model_batches=4)
    assert held(grouped, "optimizer state of some layers") == {"step": 2.7}
    plain = parts()
    assert held(plain, "masters")["update"] == 4 and held(plain, "moments")["update"] == 8
    assert held(plain, "optimizer state of some layers") == {}
    assert memory_plan(config(**RUN, offload_optimizer=True), GPU).host_bytes == 12 * P
    assert memory_plan(config(**RUN), GPU).host_bytes == 0


@pytest.mark.parametrize(("groups", "share"), [(None, 0.1), (20, 0.1), (100, 0.1), (7, 0.135), (1, 0.9)])
def test_the_largest_group(groups: int | None, share: float) -> None:
    options = config(offload_optimizer=True, move_model_batches=groups)
    assert group_share(options, MODEL, full=True) == pytest.approx(share)
    assert group_share(config(move_model_batches=groups), MODEL, full=True) == 0


def test_a_reference_is_there_while_it_annotates() -> None:
    assert set(held(parts(beta=0.1), "reference")) >= {"rollout", "annotate", "update", "step"}
    assert held(parts(beta=0.1, offload_reference=True), "reference") == {"annotate": 2}
    moving = parts(beta=0.1, offload_reference=True, sync_ref_model=True)
    assert held(moving, "reference in float32") == {"annotate": 4}


def test_a_rollout_has_the_memory_of_what_it_does_not_need() -> None:
    phases = parts(beta=0.1, offload_model=True)
    for name in ("masters", "moments", "reference"):
        assert set(held(phases, name)) == {"annotate", "update", "step"}
    assert held(phases, "weights")["rollout"] == 2
    sharded = replace(GPU, layout=Layout(num_gpus=2, gpu_bytes=80 * 10**9, zero_stage=3, fsdp=True))
    assert set(held(parts(sharded, offload_model=True), "masters")) >= {"update", "step"}
    assert "rollout" not in held(parts(sharded, offload_model=True), "masters")


def test_moments_of_8_bits_take_2_bytes_and_their_scales() -> None:
    assert held(parts(optim="adamw_8bit"), "moments")["update"] == 2 + 8 / 256


def test_a_cpu_saves_nothing() -> None:
    """What leaves goes to the same memory, and the room that it comes back to is not given away."""
    cpu = changed(GPU, machine={"cuda": False})
    for name in ("offload_optimizer", "offload_model", "offload_reference"):
        plain, moved = (memory_plan(config(**RUN, beta=0.1, **{name: on}), cpu) for on in (False, True))
        assert moved.needed_bytes >= plain.needed_bytes, name


def test_a_run_that_is_too_large_is_told_what_to_offload() -> None:
    """Each way out fits by the same arithmetic, and is typed as it is shown."""
    options = config(**RUN, beta=0.1)
    needed = memory_plan(options, GPU).needed_bytes
    tight = changed(GPU, machine={"free_memory_bytes": int(0.8 * needed)})
    (refused,) = memory_problems(options, tight)
    edits = [dict(fix.edits) for fix in refused.fixes]
    assert {"offload_optimizer": True} in edits
    for fix in refused.fixes:
        if "ignore_memory_forecast" not in fix.edits:
            assert memory_plan(options.model_copy(update=dict(fix.edits)), tight).share <= 0.9


def test_levers_are_proposed_in_the_order_of_their_cost() -> None:
    """Where each is enough. The rollout does not bind, so giving it memory is not proposed."""
    run = {**RUN, "beta": 0.1, "gradient_checkpointing": "true", "per_device_train_batch_size": 1}
    limit = memory_plan(config(**run), GPU).needed_bytes - 1
    fixes = fitting_fixes(config(**run), GPU, None, limit)
    assert [[*fix.edits] for fix in fixes] == [["offload_reference"], ["offload_optimizer"], ["optim"]]
    # What has no reference has none to offload.
    run["beta"] = 0.0
    limit = memory_plan(config(**run), GPU).needed_bytes - 1
    others = fitting_fixes(config(**run), GPU, None, limit)
    assert [[*fix.edits] for fix in others] == [["offload_optimizer"], ["optim"], ["tuner_type"]]


SHARDED = Layout(num_gpus=2, gpu_bytes=80 * 10**9, is_here=True, zero_stage=3, fsdp=True)
ZERO = Layout(num_gpus=2, gpu_bytes=80 * 10**9, zero_stage=2)


@pytest.mark.parametrize(
    ("options", "layout", "codes"),
    [
        ({"offload_optimizer": True}, SHARDED, []),
        ({"offload_optimizer": True}, replace(SHARDED, offload="params"), ["W108"]),
        ({"optim": "adamw_8bit"}, SHARDED, ["E115"]),
        ({"optim": "adamw_8bit"}, ZERO, ["E115"]),
        ({"optim": "adamw_8bit", "deepspeed": "zero0"}, replace(ZERO, zero_stage=0), []),
        ({"offload_optimizer": True, "deepspeed": "zero0"}, replace(ZERO, zero_stage=0), []),
        ({"offload_optimizer": True}, ZERO, ["E115"]),
        ({"offload_optimizer": True}, replace(ZERO, offload="optimizer"), ["W108"]),
        ({"offload_model": True}, replace(ZERO, offload="optimizer"), ["E115"]),
        ({"offload_model": True}, replace(ZERO, zero_stage=3, offload="params"), ["W108"]),
    ],
)
def test_beside_what_holds_the_state(options: dict[str, Any], layout: Layout, codes: list[str]) -> None:
    """covey shards or DeepSpeed does: refused by name, or done already."""
    problems = found(facts(layout=layout, launch={"num_processes": 2}), **options)
    assert [p.code for p in problems if p.option in options] == codes
    for problem in problems:
        assert problem.option not in options or problem.fixes[0].edits


def test_what_deepspeed_holds_is_not_moved_by_covey() -> None:
    from covey.learner.offload import own_offloads

    levers = {"offload_optimizer": True, "offload_model": True, "offload_reference": True}
    moved = own_offloads(config(**levers), SHARDED)
    assert moved.offload_optimizer and moved.offload_model and moved.offload_reference
    whole = own_offloads(config(deepspeed="zero0", **levers), replace(ZERO, zero_stage=0))
    assert whole.offload_optimizer and whole.offload_model and whole.offload_reference
    held = own_offloads(config(**levers), replace(ZERO, offload="optimizer"))
    assert not (held.offload_optimizer or held.offload_model or held.offload_reference)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload_reference": True}, "beta is 0"),
        ({"offload_reference": True, "beta": 0.1, "tuner_type": "lora"}, "adapter off"),
        ({"move_model_batches": 4}, "offload_optimizer is off"),
    ],
)
def test_what_has_nothing_to_act_on(options: dict[str, Any], words: str) -> None:
    told = [p for p in checks(config(**options), facts(), set(options)) if p.option in options]
    assert [p.code for p in told] == ["W108"] and words in told[0].seen


def test_on_a_cpu_it_is_said() -> None:
    told = found(facts(machine={"cuda": False}), offload_optimizer=True)
    assert [p.code for p in told if p.option == "offload_optimizer"] == ["W108"]
