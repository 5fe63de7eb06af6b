"""What `accelerate launch` hands on to a process, as options: TRL's files, other files, what is typed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from covey.config import Resolved, from_dict, parse, resolve, to_yaml
from covey.plan.deepspeed import states_of
from covey.plan.deepspeed_file import from_content
from covey.types import Problem, Severity

RUN = {"model": "m", "dataset": "d.jsonl", "reward_funcs": "accuracy"}
# What accelerate 1.15 sets for the files of TRL 1.16 (accelerate_configs/); recorded from its processes.
_MULTI = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "bf16"}
_ZERO = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true"}
_STAGE, _ACCUMULATION = "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_OPTIMIZER = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"
_PARAM = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"
_NOT_OFFLOADED = {_OPTIMIZER: "none", _PARAM: "none"}
_FSDP = {
    **_MULTI,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_VERSION": "2",
}
FILES: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "zero1": (
        {**_ZERO, _STAGE: "1", _ACCUMULATION: "1"},
        {"deepspeed": "zero1", "gradient_accumulation_steps": 1},
    ),
    "zero2": ({**_ZERO, **_NOT_OFFLOADED, _STAGE: "2"}, {"deepspeed": "zero2"}),
    "zero3": (
        {**_ZERO, **_NOT_OFFLOADED, _STAGE: "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
        {"deepspeed": "zero3"},
    ),
    "fsdp1": (
        {**_FSDP, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "full_shard"},
        {"fsdp": "full_shard"},
    ),
    "fsdp2": ({**_FSDP, "FSDP_RESHARD_AFTER_FORWARD": "true"}, {"fsdp": "full_shard"}),
    "multi_gpu": (_MULTI, {}),
    # It names 8 processes, of which accelerate starts one.
    "single_gpu": ({**_MULTI, "ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1"}, {}),
}


def under(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], **options: Any) -> Resolved:
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return from_dict({**RUN, **options}, 2)


def codes(found: Resolved) -> list[str]:
    return [problem.code for problem in found.problems]


def errors(problems: tuple[Problem, ...]) -> list[Problem]:
    return [problem for problem in problems if problem.severity is Severity.ERROR]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_trl(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    environment, expected = FILES[file]
    found = under(monkeypatch, environment)
    plain = from_dict(RUN, 2)
    assert codes(found) == (["W193"] if expected else ["W192"] if file == "single_gpu" else [])
    assert found.config == plain.config.model_copy(update={**expected, **_follows(expected)})
    for name in expected:
        assert found.sources[name].startswith("environment of accelerate launch: ")
        assert name in found.problems[0].seen
        # The run says so, and its file gives the same run without accelerate.
        assert f"  {name}: {expected[name]}  # environment of accelerate launch" in to_yaml(found)


def _follows(expected: Mapping[str, Any]) -> dict[str, int]:
    """The batch of one forward pass a step, which is not the default."""
    one_pass = {"steps_per_generation": 1, "generation_batch_size": 16}
    return one_pass if "gradient_accumulation_steps" in expected else {}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        # DeepSpeed's default is stage 2.
        ({**_ZERO}, {"deepspeed": "zero2"}),
        ({**_ZERO, _STAGE: "0"}, {"deepspeed": "zero0"}),
        ({**_ZERO, _STAGE: "2", _OPTIMIZER: "cpu"}, {"deepspeed": "zero2_offload"}),
        ({**_ZERO, _STAGE: "3", _OPTIMIZER: "cpu", _PARAM: "cpu"}, {"deepspeed": "zero3_offload"}),
        ({**_ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, {"deepspeed": "ds.json"}),
        ({**_ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none", _STAGE: "3"}, {"deepspeed": "zero3"}),
        ({**_ZERO, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"deepspeed": "zero2", "max_grad_norm": 0.5}),
        ({**_ZERO, _ACCUMULATION: "auto"}, {"deepspeed": "zero2"}),
        ({**_FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"fsdp": "shard_grad_op"}),
        ({**_FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {"fsdp": "full_shard", "fsdp_offload": True}),
        (
            {**_FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"fsdp": "full_shard", "gradient_checkpointing": "true"},
        ),
        # FSDP1 reads its strategy from one variable alone.
        (
            {**_FSDP, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "full_shard",
             "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"},
            {"fsdp": "hybrid_shard"},
        ),
        ({**_FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "2"}, {"fsdp": "2"}),
        ({"ACCELERATE_USE_FSDP": "true"}, {"fsdp": "full_shard"}),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false", _STAGE: "3"}, {}),
    ],
)  # fmt: skip
def test_other_files(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], options: dict[str, Any]
) -> None:
    found = under(monkeypatch, changes)
    assert found.config == from_dict(RUN, 2).config.model_copy(update=options)
    assert codes(found) == (["W193"] if options else [])


@pytest.mark.parametrize(
    ("stage", "offloads"), [("1", ["optimizer"]), ("3", ["optimizer"]), ("3", ["param"]), ("2", ["param"])]
)
def test_what_no_name_offloads_is_json(
    monkeypatch: pytest.MonkeyPatch, stage: str, offloads: list[str]
) -> None:
    devices = {{"optimizer": _OPTIMIZER, "param": _PARAM}[name]: "cpu" for name in offloads}
    found = under(monkeypatch, {**_ZERO, _STAGE: stage, **devices}).config.deepspeed
    blocks = {f"offload_{name}": {"device": "cpu"} for name in offloads}
    assert json.loads(found or "") == {"zero_optimization": {"stage": int(stage), **blocks}}


@pytest.mark.parametrize(
    "typed", [{"deepspeed": "zero2"}, {"fsdp": "off"}, {"fsdp": "hybrid_shard"}, {"deepspeed": "zero0"}]
)
def test_what_is_typed_wins(monkeypatch: pytest.MonkeyPatch, typed: dict[str, str]) -> None:
    for environment in (FILES["zero3"][0], FILES["fsdp1"][0], {"ACCELERATE_USE_MEGATRON_LM": "true"}):
        found = under(monkeypatch, {**environment, "FSDP_OFFLOAD_PARAMS": "true"}, **typed)
        assert found.config == from_dict({**RUN, **typed}, 2).config and codes(found) == []


def test_each_other_option_that_is_typed_wins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = {**FILES["zero1"][0], "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    found = under(monkeypatch, asks, gradient_accumulation_steps=4).config
    assert (found.deepspeed, found.gradient_accumulation_steps, found.max_grad_norm) == ("zero1", 4, 0.5)
    asks = {**_FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    kept = under(monkeypatch, asks, gradient_checkpointing=False).config
    assert (kept.fsdp, kept.gradient_checkpointing) == ("full_shard", "false")


def test_null_is_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole configuration of TRL has it, and the file of an earlier run that was not sharded."""
    assert under(monkeypatch, FILES["zero3"][0], deepspeed=None, fsdp=None).config.deepspeed == "zero3"
    assert under(monkeypatch, FILES["fsdp2"][0], deepspeed=None, fsdp="").config.fsdp == "full_shard"


REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "MODEL_PARALLEL",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "PARALLELISM_CONFIG_CP_SIZE": "4",
    "PARALLELISM_CONFIG_SP_SIZE": "2",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
    "FSDP_IGNORED_MODULES": "lm_head",
    _OPTIMIZER: "nvme",
    _PARAM: "nvme",
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "XLA_USE_BF16": "1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_covey_does_not_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    environment = {**FILES["fsdp2"][0], name: REFUSED[name]}
    found = under(monkeypatch, environment)
    (refused,) = errors(found.problems)
    assert refused.code == "E379" and f"{name} is {REFUSED[name]}." in refused.seen and refused.fixes
    for fix in refused.fixes:
        if fix.edits:
            assert errors(under(monkeypatch, environment, **fix.edits).problems) == []


@pytest.mark.parametrize("value", ["fp16", "fp8"])
def test_a_dtype_that_is_typed_is_computed_in(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    asks = {"ACCELERATE_MIXED_PRECISION": value}
    assert codes(under(monkeypatch, asks)) == codes(under(monkeypatch, asks, torch_dtype="auto")) == ["E379"]
    assert codes(under(monkeypatch, asks, bf16=True)) == []


def test_one_process_where_accelerate_was_asked_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its launcher of a single process leaves the variables, of which one for each process lacks."""
    said = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    (found,) = under(monkeypatch, said).problems
    assert found.code == "W192" and found.severity is Severity.WARNING
    assert "--nproc_per_node N" in found.fixes[0].text
    one = {"ACCELERATE_MIXED_PRECISION": "no"}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for alike in (one, {**said, **ranks}, {**said, "NNODES": "2"}, {"MASTER_ADDR": "node1"}):
        assert codes(under(monkeypatch, alike)) == []
    assert codes(under(monkeypatch, said, nproc_per_node=2)) == []


def is_sharded_or_refused(found: Resolved) -> bool:
    deepspeed = found.config.deepspeed or ""
    read = from_content(json.loads(deepspeed), "json") if deepspeed.startswith("{") else None
    states, problems = states_of(found.config, read)
    return states.stage > 0 or errors((*found.problems, *problems)) != []


_WORDS = ("", "None", "false", "x", "7")


def asks_for_sharding() -> list[dict[str, str]]:
    """Every way to ask for it, whole and with words that accelerate does not have."""
    zero = [
        {"ACCELERATE_USE_DEEPSPEED": on, _STAGE: stage, _OPTIMIZER: optimizer, _PARAM: param}
        for on, stage, optimizer, param in itertools.product(
            ("true", "True", "1", "y"),
            ("1", "2", "3", *_WORDS),
            ("none", "cpu", "nvme", "x"),
            ("none", "cpu"),
        )
    ]
    fsdp = [
        {"ACCELERATE_USE_FSDP": on, "FSDP_VERSION": version, "FSDP_SHARDING_STRATEGY": strategy,
         "FSDP_RESHARD_AFTER_FORWARD": reshard, "FSDP_OFFLOAD_PARAMS": offload}
        for on, version, strategy, reshard, offload in itertools.product(
            ("true", "t"), ("1", "2", "x"), ("FULL_SHARD", "SHARD_GRAD_OP", "1", "5", *_WORDS),
            ("true", "full_shard", *_WORDS), ("true", "false"),
        )
    ]  # fmt: skip
    return [*zero, *fsdp, *({name: value} for name, value in REFUSED.items() if name.startswith("PARALLEL"))]


def test_sharding_that_is_asked_for_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing typed, and with the nulls of a whole configuration of TRL."""
    left_out = [
        asks
        for asks in asks_for_sharding()
        for nulls in ({}, {"deepspeed": None, "fsdp": None, "fsdp_config": None})
        if not is_sharded_or_refused(under(monkeypatch, asks, **nulls))
    ]
    assert left_out == []
    # It sees a run that is not sharded.
    assert not is_sharded_or_refused(under(monkeypatch, FILES["multi_gpu"][0]))
    assert not is_sharded_or_refused(under(monkeypatch, {**_ZERO, _STAGE: "0"}))


def test_the_command_line_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for name, value in RUN.items() for word in (f"--{name}", value)]
    for name, value in FILES["zero3"][0].items():
        monkeypatch.setenv(name, value)
    assert resolve(parse(words).typed, 2).config.deepspeed == "zero3"
    assert resolve(parse([*words, "--deepspeed", "zero2"]).typed, 2).config.deepspeed == "zero2"
