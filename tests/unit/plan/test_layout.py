"""Layouts on GPUs that are not here, held to published figures and to sums by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.checks.batch import batch_plan
from covey.checks.model.checkpoint_sizes import checkpoint_sizes
from covey.models.adapter_shapes import LoraSettings, facts_of
from covey.models.config_shapes import shapes_of_config
from covey.plan.disk import size
from covey.plan.layout import THIS_MACHINE, Layout, state_bytes
from covey.plan.memory import MemoryPlan, memory_plan
from covey.plan.publish import publish_plan
from covey.plan.report import report_lines
from support.checks import config
from support.layouts import EIGHT, GIB, HIDDEN, MODEL, OFFLOADED, SHARDED, SHORT, WORDS, P, elsewhere


def plan(layout: Layout, **options: Any) -> MemoryPlan:
    return memory_plan(config(**{**SHORT, "steps_per_generation": 1, **options}), elsewhere(layout))


def parts(layout: Layout, phase: str, **options: Any) -> dict[str, int]:
    return next(dict(p.parts) for p in plan(layout, **options).phases if p.name == phase)


@pytest.mark.parametrize(("stage", "published"), [(0, 113), (1, 39), (2, 27), (3, 14)])
def test_states_of_7_6_billion_parameters_as_deepspeed_estimates_them(stage: int, published: int) -> None:
    """In GiB on each of 8 GPUs, with gradients of 2 bytes."""
    found = state_bytes(7_615_616_512, replace(EIGHT, zero_stage=stage), gradient_bytes=2) / GIB
    assert found == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_the_step_holds_the_states(stage: int, offload: Any) -> None:
    """The phases are made of the same shares, with gradients of 4 bytes."""
    layout = replace(EIGHT, zero_stage=stage, offload=offload)
    held = parts(layout, "step")
    states = sum(held[name] for name in ("weights", "masters", "moments", "gradients"))
    assert states == pytest.approx(state_bytes(P, layout, gradient_bytes=4), abs=8)


@pytest.mark.parametrize(
    ("stage", "offload", "per_parameter"),
    [
        (0, "none", 18),
        (1, "none", 6 + 12 / 8),
        (2, "none", 2 + 16 / 8),
        (3, "none", 18 / 8),
        # DeepSpeed's page: with the optimizer offloaded 2 bytes a parameter in stage 2, 2 / N in stage 3.
        (2, "optimizer", 2),
        (3, "optimizer", 2 / 8),
        (3, "params", 0),
    ],
)
def test_shares(stage: int, offload: Any, per_parameter: float) -> None:
    layout = replace(EIGHT, zero_stage=stage, offload=offload)
    assert state_bytes(P, layout, gradient_bytes=4) == pytest.approx(per_parameter * P, abs=8)


@pytest.mark.parametrize(("offload", "per_parameter"), [("none", 0), ("optimizer", 16), ("params", 18)])
def test_the_machines_memory(offload: Any, per_parameter: int) -> None:
    """DeepSpeed's page has the same 16 and 18 bytes, before its margin."""
    assert plan(replace(SHARDED, offload=offload)).host_bytes == per_parameter * P


def test_the_reference_is_sharded_and_offloaded_with_the_weights() -> None:
    assert parts(EIGHT, "update", beta=0.04)["reference"] == 2 * P
    assert parts(SHARDED, "update", beta=0.04)["reference"] == pytest.approx(2 * P / 8, abs=1)
    assert plan(OFFLOADED, beta=0.04).host_bytes == 20 * P
    assert "reference" not in parts(SHARDED, "update", beta=0.0)


def test_adapters_leave_little_to_cut() -> None:
    held = parts(replace(EIGHT, zero_stage=2), "step", tuner_type="lora")
    assert held["weights"] == 2 * P
    assert held["moments"] == 8 * MODEL.adapter_parameters // 8
    assert held["gradients"] == 4 * MODEL.adapter_parameters // 8


def test_stage_3_gathers_what_it_works_with() -> None:
    """All weights to sample with them; in a pass what DeepSpeed may keep, and the gradient of the head."""
    assert parts(SHARDED, "rollout")["gathered weights"] == 2 * P - parts(SHARDED, "rollout")["weights"]
    layer = (P - 2 * WORDS * HIDDEN) // MODEL.layers
    live = P - (MODEL.layers - 2) * layer
    assert live > 1_000_000_000
    assert parts(SHARDED, "update")["gathered layers"] == 2 * (live + WORDS * HIDDEN)
    assert parts(SHARDED, "load")["gathered layers"] == 2 * (live + WORDS * HIDDEN)
    assert "gathered weights" not in parts(replace(EIGHT, zero_stage=2), "rollout")
    assert "gathered layers" not in parts(replace(EIGHT, zero_stage=2), "update")


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float32", 4)])
def test_an_engine_has_one_size_of_weights(dtype: str, element: int) -> None:
    """In the forecast, in what is published, and in words: those of the dtype that the run computes in."""
    layout = replace(SHARDED, engine="colocate", engine_share=0.9, engine_parallel=4, engine_sleeps=True)
    run = config(**SHORT, steps_per_generation=1, torch_dtype=dtype)
    given, weights = elsewhere(layout), element * P // 4
    published = publish_plan(run, given)
    assert published is not None and published.weight_bytes == weights
    assert parts(layout, "publish", torch_dtype=dtype)["engine"] == weights
    lines = report_lines(run, given, batch_plan(run, 8, 512))
    assert any(
        f"vLLM's {size(layout.engine_bytes)} of each GPU: {size(weights)} of" in line for line in lines
    )


def test_a_colocated_engine_holds_its_share_until_it_sleeps() -> None:
    awake = replace(OFFLOADED, engine="colocate", engine_share=0.4, engine_parallel=4)
    share = int(0.4 * 96 * GIB)
    for name in ("load", "rollout", "update", "step", "publish"):
        assert parts(awake, name)["engine"] == share
    assert not {"KV cache", "sampling", "gathered weights"} & set(parts(awake, "rollout"))
    asleep = replace(awake, engine_sleeps=True)
    assert parts(asleep, "rollout")["engine"] == share
    assert "engine" not in parts(asleep, "update")
    # Awake for its weights alone, a quarter of them on each GPU.
    assert parts(asleep, "publish")["engine"] == 2 * P // 4
    assert parts(asleep, "publish")["gathered tensor"] == 2 * 2 * WORDS * HIDDEN


def test_a_server_takes_nothing_of_these_gpus() -> None:
    assert sum(parts(replace(SHARDED, engine="server"), "rollout").values()) < sum(
        parts(SHARDED, "rollout").values()
    )
    assert parts(replace(SHARDED, engine="server"), "rollout")["engine"] == 0


def test_32_billion_parameters_on_eight_gpus_of_96_gib() -> None:
    fits, whole, sharded = plan(OFFLOADED), plan(EIGHT), plan(SHARDED)
    assert fits.share < 0.9
    assert (whole.binding.name, sharded.binding.name) == ("update", "rollout")
    assert whole.share > 18 * P / (96 * GIB)
    assert 1 < sharded.share < 1.5


@pytest.mark.parametrize("layout", [EIGHT, SHARDED])
def test_every_phase_is_there(layout: Layout) -> None:
    names = [p.name for p in plan(layout, beta=0.1).phases]
    assert names == ["load", "rollout", "annotate", "update", "step", "publish"]


def test_ddp_elsewhere_is_ddp_here() -> None:
    """The layout that this version runs takes what the same GPUs take without one, and what NCCL adds."""
    options = config(**SHORT, steps_per_generation=1)
    here = memory_plan(options, replace(elsewhere(EIGHT), layout=THIS_MACHINE))
    there = memory_plan(options, elsewhere(EIGHT))
    without = [dict(p.parts) for p in there.phases if p.name != "publish"]
    for mine, other in zip([dict(p.parts) for p in here.phases], without, strict=True):
        other.pop("communication", None)
        assert mine == other


def lines(layout: Layout, **options: Any) -> str:
    run = config(**{**SHORT, "steps_per_generation": 1, **options})
    return "\n".join(report_lines(run, elsewhere(layout), batch_plan(run, 8)))


def test_the_report_says_what_is_a_forecast_alone() -> None:
    assert "8 GPUs of 103.1 GB (96 GiB); DDP (ZeRO-0)" in lines(EIGHT)
    text = lines(OFFLOADED)
    assert "ZeRO-3, optimizer and weights offloaded" in text
    assert (
        "planned with options that only `covey plan` has; `covey "
        "train` takes --deepspeed zero3_offload for it" in text
    )
    assert "589.7 GB in a machine's memory; 884.6 GB with the margin that DeepSpeed's estimator adds" in text
    assert "model states 73.72 GB per GPU; " in lines(SHARDED)


def test_a_checkpoint_of_7_6_billion_parameters(tmp_path: Path) -> None:
    """The model alone is the 15 GB of a published run. Its 43 GiB with everything are 6 bytes a parameter,
    moments of 2 bytes each; here moments and masters are float32, so it is 14."""
    described = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": WORDS}
    described |= {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944}
    shapes = shapes_of_config(described)
    assert shapes is not None
    number = facts_of(shapes, LoraSettings(rank=8, alpha=16.0)).num_base
    sizes = checkpoint_sizes(config(), tmp_path, shapes, None, num_processes=8, has_bfloat16=True)
    assert sizes.model / 1e9 == pytest.approx(15.2, rel=0.01)
    assert sizes.whole == pytest.approx(14 * number, rel=0.001)
    assert (sizes.model + 4 * number) / GIB == pytest.approx(43, rel=0.02)
