"""What DeepSpeed's engine is started with, and what a file may say beside the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.checks.deepspeed import deepspeed_problems
from covey.checks.run.look import run_facts, with_layout
from covey.options.schema import Config
from covey.plan.check_layout import layout_problems
from covey.plan.deepspeed import engine_settings, states_of
from covey.plan.deepspeed_file import from_content
from covey.plan.facts import Facts
from covey.plan.layout import Machine, layout_of
from covey.types import Problem, Severity
from support.checks import changed, config
from support.deepspeed_files import MS_SWIFT, TRANSFORMERS
from support.layouts import EIGHT, HIDDEN, SHORT, elsewhere

RUN: dict[str, Any] = {**SHORT, "per_device_train_batch_size": 8, "torch_dtype": "bfloat16"}
OWNED = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": False},
}


def laid_out(options: Config, content: Any = None) -> tuple[Facts, list[Problem]]:
    """The facts of a run on eight GPUs with the layout of its option, or of a file, and all that is said."""
    read = None if content is None else from_content(content, "ds.json")
    states, problems = states_of(options, read, cuda=True)
    layout = layout_of(options, 8, EIGHT.gpu_bytes, states, is_here=False)
    facts = elsewhere(layout)
    return facts, [*problems, *deepspeed_problems(options, facts)]


def settings(content: Any = None, **options: Any) -> dict[str, Any]:
    run = config(**RUN, **options)
    return engine_settings(run, laid_out(run, content)[0])


def said(content: Any, **options: Any) -> list[Problem]:
    return laid_out(config(**{**RUN, "deepspeed": "ds.json", **options}), content)[1]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_the_files_of_ms_swift_are_its_names(name: str) -> None:
    """Unchanged, and with what covey owns; nothing is to be said of them but that ZeRO-1 is ZeRO-2."""
    by_name, by_file = settings(deepspeed=name), settings(MS_SWIFT[name], deepspeed="ds.json")
    for got in (by_name, by_file):
        assert got.items() >= OWNED.items()
        assert got["bf16"] == {"enabled": True} and got["steps_per_print"] > 10**6
        assert got["train_micro_batch_size_per_gpu"] == 8
        assert not {"optimizer", "scheduler", "train_batch_size"} & got.keys()
        assert "auto" not in json.dumps(got)
    assert by_file["zero_optimization"].items() >= by_name["zero_optimization"].items()
    codes = [p.code for p in said(MS_SWIFT[name])]
    assert codes == (["W119"] if name == "zero1" else [])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_files_of_transformers(name: str) -> None:
    assert said(TRANSFORMERS[name]) == []
    got = settings(TRANSFORMERS[name], deepspeed="ds.json")
    assert got == settings(MS_SWIFT[name], deepspeed="ds.json")
    # Its schedule is another one than that of the command.
    (note,) = said(TRANSFORMERS[name], lr_scheduler_type="cosine")
    assert (note.code, note.severity) == ("W126", Severity.WARNING) and "WarmupLR" in note.seen


def test_auto_is_filled_as_transformers_does() -> None:
    zero = settings(MS_SWIFT["zero3"], deepspeed="ds.json")["zero_optimization"]
    assert zero["reduce_bucket_size"] == HIDDEN**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * HIDDEN**2)
    assert zero["stage3_param_persistence_threshold"] == 10 * HIDDEN
    # What a model of unknown width has no number for is DeepSpeed's to choose.
    run = config(**RUN, deepspeed="zero3")
    facts = changed(laid_out(run)[0], model={"sizes": None})
    assert "reduce_bucket_size" not in engine_settings(run, facts)["zero_optimization"]


@pytest.mark.parametrize(
    ("name", "offloaded"),
    [
        ("zero2", set()),
        ("zero2_offload", {"offload_optimizer"}),
        ("zero3_offload", {"offload_optimizer", "offload_param"}),
    ],
)
def test_what_is_offloaded(name: str, offloaded: set[str]) -> None:
    run = config(**RUN, deepspeed=name)
    facts = laid_out(run)[0]
    for cuda in (True, False):
        zero = engine_settings(run, changed(facts, machine={"cuda": cuda}))["zero_optimization"]
        assert {n for n in zero if n.startswith("offload")} == offloaded
        # Pinned memory is for copies to a GPU.
        assert all(zero[n] == {"device": "cpu", "pin_memory": cuda} for n in offloaded)


def test_weights_alone_and_old_switches() -> None:
    alone = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}}
    zero = settings(alone, deepspeed="ds.json")["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert "offload_optimizer" in settings(old, deepspeed="ds.json")["zero_optimization"]


def test_zero_1_in_bfloat16_is_zero_2() -> None:
    """Whose optimizer leaves what covey clips unread; in float32, and with the optimizer offloaded, it
    stays."""
    offloaded = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    for content, options, stage in (
        (None, {"deepspeed": "zero1"}, 2),
        (None, {"deepspeed": "zero1", "torch_dtype": "auto"}, 2),
        (None, {"deepspeed": "zero1", "torch_dtype": "float32"}, 1),
        (offloaded, {"deepspeed": "ds.json"}, 1),
    ):
        run = config(**{**RUN, **options})
        facts, problems = laid_out(run, content)
        assert engine_settings(run, facts)["zero_optimization"]["stage"] == facts.layout.zero_stage == stage
        assert [p.code for p in problems] == (["W119"] if stage == 2 else [])
        assert engine_settings(run, facts)["bf16"]["enabled"] is (options.get("torch_dtype") != "float32")


HARD = {
    **MS_SWIFT["zero2"],
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "check_grad_overflow": True},
    "data_types": {"grad_accum_dtype": "bf16"},
    "communication_data_type": "fp16",
    "prescale_gradients": True,
    "zero_force_ds_cpu_optimizer": True,
    "elasticity": {"enabled": True, "max_train_batch_size": 64},
    "curriculum_learning": {"enabled": True},
    "data_efficiency": {"enabled": False},
    "flops_profiler": {"enabled": True},
    "comms_logger": {"enabled": True},
    "checkpoint": {"tag_validation": "Warn"},
    "made_up": 3,
}


def test_what_covey_owns_is_overridden_and_said_once() -> None:
    (note,) = said(HARD)
    assert (note.code, note.severity) == ("W126", Severity.WARNING)
    for name in (
        "bf16.bf16_master_weights_and_grads", "bf16.check_grad_overflow", "data_types.grad_accum_dtype",
        "communication_data_type", "prescale_gradients", "zero_force_ds_cpu_optimizer", "elasticity",
        "curriculum_learning", "flops_profiler", "checkpoint", "made_up",
    ):  # fmt: skip
        assert note.seen.count(name) == 1
    (fix,) = note.fixes
    assert fix.text.startswith("check the spelling of made_up; in covey, ")
    assert "data_efficiency" not in note.seen and "comms_logger" not in note.seen
    got = settings(HARD, deepspeed="ds.json")
    assert got.items() >= OWNED.items() and got["bf16"] == {"enabled": True}
    assert got.keys() - OWNED.keys() == {
        "train_micro_batch_size_per_gpu", "bf16", "steps_per_print", "zero_optimization", "comms_logger",
    }  # fmt: skip


def test_a_zero_setting_that_deepspeed_has_not_does_not_reach_it() -> None:
    content = {"zero_optimization": {"stage": 2, "overlap_com": True, "sub_group_size": 1e14}}
    assert settings(content, deepspeed="ds.json")["zero_optimization"] == {
        "stage": 2,
        "sub_group_size": 10**14,
    }
    (note,) = said(content)
    assert "zero_optimization.overlap_com" in note.seen


@pytest.mark.parametrize(
    ("content", "of_file", "of_run", "edits"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5", "max_grad_norm 1", {"max_grad_norm": 0.5}),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}}},
            "betas",
            "learning_rate 1e-06",
            {"learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.999},
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500}}},
            "warmup_num_steps 500",
            "warmup_steps 0",
            {"learning_rate": 3e-5, "warmup_steps": 500},
        ),
        ({"bf16": {"enabled": False}}, "bf16.enabled false", "torch_dtype", {"torch_dtype": "float32"}),
        ({"fp16": {"enabled": True}}, "fp16.enabled true", "torch_dtype bfloat16", {}),
    ],
)
def test_a_file_that_contradicts_the_command(
    content: dict[str, Any], of_file: str, of_run: str, edits: dict[str, Any]
) -> None:
    """Both sides are named, and the file's numbers, once typed, agree with it."""
    content = {"zero_optimization": {"stage": 2}, **content}
    (fault,) = said(content)
    assert (fault.code, fault.severity) == ("E219", Severity.ERROR)
    assert of_file in fault.seen and of_run in fault.seen
    assert [dict(fix.edits) for fix in fault.fixes if fix.edits] == ([edits] if edits else [])
    assert any('"auto"' in fix.text for fix in fault.fixes)
    if edits:
        assert not [p for p in said(content, **edits) if p.code == "E219"]


def test_a_file_that_agrees_with_the_command() -> None:
    content = {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }
    run = {"max_grad_norm": 0.5, "learning_rate": 1e-5, "adam_beta2": 0.95, "weight_decay": 0.1}
    assert said(content, **run) == []


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "mics_shard_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "ratio"),
        ({"amp": {"enabled": True}}, "amp.enabled"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type"),
    ],
)
def test_what_covey_does_not_run_with_is_refused_by_name(content: dict[str, Any], name: str) -> None:
    (fault,) = (p for p in said(content) if p.severity is Severity.ERROR)
    assert fault.code == "E220"
    assert name in fault.seen and name in fault.fixes[0].text


@pytest.mark.parametrize("gpu_bytes", [EIGHT.gpu_bytes, 0])
@pytest.mark.parametrize(
    ("stage", "block", "instead"),
    [(2, "offload_param", ["zero3_offload", "zero2_offload"]), (0, "offload_optimizer", [None])],
)
def test_offloading_that_a_stage_has_not(
    stage: int, block: str, instead: list[str | None], gpu_bytes: int
) -> None:
    """Of GPUs whose memory is not known too."""
    run = config(**RUN, deepspeed="ds.json")
    facts = laid_out(run, {"zero_optimization": {"stage": stage, block: {"device": "cpu"}}})[0]
    facts = replace(facts, layout=replace(facts.layout, gpu_bytes=gpu_bytes))
    (fault,) = layout_problems(run, facts)
    assert (fault.code, fault.option) == ("E213", "deepspeed") and "ds.json" in fault.seen
    typed = [fix.edits.get("deepspeed") for fix in fault.fixes]
    assert [word for word in typed if word in instead] == instead


def test_what_is_off_is_not_refused() -> None:
    off = {
        "zero_hpz_partition_size": 1, "mics_shard_size": -1, "zero_quantized_weights": False,
        "zero_quantized_gradients": False, "offload_optimizer": {"device": "cpu", "ratio": 1.0},
    }  # fmt: skip
    content = {"zero_optimization": {"stage": 3, **off}, "tensor_parallel": {"autotp_size": 1}}
    assert said({**content, "amp": {"enabled": False}, "sequence_parallel_size": 1}) == []


def test_json_in_the_place_of_a_path(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    machine = Machine(num_gpus=8, gpu_bytes=EIGHT.gpu_bytes)
    run = config(**RUN, deepspeed=text, output_dir=str(tmp_path))
    layout = with_layout(run_facts(run, 8), run, machine).layout
    assert (layout.zero_stage, layout.offload) == (3, "optimizer")
    broken = config(**RUN, deepspeed=text[:-1], output_dir=str(tmp_path))
    assert [p.code for p in with_layout(run_facts(broken, 8), broken, machine).launch.layout_problems] == [
        "E217"
    ]
