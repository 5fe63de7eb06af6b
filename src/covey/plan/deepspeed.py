"""DeepSpeed's ZeRO: where the states of a run lie by `deepspeed`, and what its engine is started with.

covey's loop sums the gradients of a step's micro-batches, checks that they are finite on every rank, clips
them and then asks the engine for one step. So accumulation, clipping, the optimizer and its schedule are
covey's, and the engine gets the settings under which it does none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.options.schema import Config
from covey.plan.deepspeed_file import ROWS, ZERO, FromFile, setting
from covey.plan.facts import Facts
from covey.plan.fsdp import fsdp_states
from covey.plan.layout import OFFLOAD_BLOCKS, PRESETS, States, computes_low
from covey.plan.problem import problem, warning
from covey.texts import joined, tr
from covey.types import Fix, Problem

# Settings of zero_optimization that change speed and memory, and no result.
KEPT_ZERO = frozenset(
    {
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "enable_sanity_checks",
        "ignore_unused_parameters", "leaf_module", "load_from_fp32_weights", "log_trace_cache_warnings",
        "memory_efficient_linear", "overlap_comm",
        "override_module_apply", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
        "sub_group_size", "use_multi_rank_bucket_allreduce",
        "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params",
    }
)  # fmt: skip
# Blocks beside zero_optimization that are passed on.
KEPT = ("comms_logger",)
# Sizes that a preset has in ms-swift's files, in elements.
_BUCKET, _GROUP = 200_000_000, 1_000_000_000
_PRESET_LOW: Mapping[str, Any] = {"allgather_bucket_size": _BUCKET, "reduce_bucket_size": _BUCKET}
_PRESET_3: Mapping[str, Any] = {
    "sub_group_size": _GROUP,
    "stage3_max_live_parameters": _GROUP,
    "stage3_max_reuse_distance": _GROUP,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
_EVERY_PRESET: Mapping[str, Any] = {"contiguous_gradients": True, "overlap_comm": False}
# What transformers makes of "auto", by the width of the model.
_BY_WIDTH = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def engine_settings(config: Config, facts: Facts) -> dict[str, Any]:
    """Return what `deepspeed.initialize(config=...)` gets, of the preset or the file of `deepspeed`.

    "auto" is filled. Of a file, what changes no number is passed on; what covey does itself is set so that
    the engine does not do it too.
    """
    is_low = computes_low(config, cuda=bool(facts.machine.cuda))
    content = {} if facts.layout.file is None else facts.layout.file.settings
    kept = {name: content[name] for name in KEPT if setting(content, name) is not None}
    return kept | {
        ROWS: config.per_device_train_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "bf16": {"enabled": is_low},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        ZERO: _zero(content, facts),
    }


def _zero(content: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """The block zero_optimization: stage and offloading are those of the layout."""
    layout, written = facts.layout, content.get(ZERO) or {}
    if layout.file is None:
        written = {**_EVERY_PRESET, **(_PRESET_3 if layout.zero_stage == 3 else _PRESET_LOW)}
    zero = {name: _filled(name, value, facts) for name, value in written.items() if name in KEPT_ZERO}
    zero = {name: value for name, value in zero.items() if value is not None}
    for name in _offloads(content, facts):
        pinned = setting(content, f"{ZERO}.{name}.pin_memory")
        # Memory is pinned for copies to a GPU.
        zero[name] = {"device": "cpu", "pin_memory": bool(facts.machine.cuda) and pinned is not False}
    return {"stage": layout.zero_stage} | zero


def _offloads(content: Mapping[str, Any], facts: Facts) -> tuple[str, ...]:
    """The blocks of what is offloaded. Weights alone may be, which no layout has a name for."""
    names = OFFLOAD_BLOCKS[facts.layout.offload]
    alone = setting(content, f"{ZERO}.offload_param.device") == "cpu" and facts.layout.zero_stage == 3
    return names if names or not alone else ("offload_param",)


def _filled(name: str, value: Any, facts: Facts) -> Any:
    """A setting with "auto" filled; None leaves it to DeepSpeed's default."""
    if value == "auto":
        hidden = 0 if facts.model.sizes is None else facts.model.sizes.hidden
        return _BY_WIDTH[name](hidden) if hidden and name in _BY_WIDTH else None
    # Files write sizes as 2e8; DeepSpeed takes integers.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def states_of(
    config: Config, read: FromFile | None, *, cuda: bool = False
) -> tuple[States, tuple[Problem, ...]]:
    """Return where the states lie by `deepspeed`, of which `read` is the file, or by `fsdp`, with every
    problem of them."""
    sharded, problems = fsdp_states(config)
    if config.deepspeed and sharded.stage:
        problems.append(_both(config))
    stage, offload = sharded.stage, sharded.offload
    if read is not None:
        problems += read.problems
        stage, offload = read.stage, read.offload
    elif config.deepspeed:
        stage, offload = PRESETS.get(config.deepspeed.lower(), (0, "none"))
        if config.deepspeed.lower() not in PRESETS:
            problems.append(_no_preset(config.deepspeed))
    if config.deepspeed and stage == 1 and offload == "none" and computes_low(config, cuda=cuda):
        problems.append(_stage_2(config.deepspeed if read is None else read.file.path))
        stage = 2
    return States(
        stage=stage,
        offload=offload,
        file=None if read is None else read.file,
        fsdp=sharded.fsdp and not config.deepspeed,
        is_hybrid=sharded.is_hybrid,
    ), tuple(problems)


def _no_preset(word: str) -> Problem:
    takes = tr("one of {presets}, or the path of a JSON file", presets=joined(", ", PRESETS))
    seen = tr("deepspeed is {word}; it must be {takes}, and there is no such file.", word=word, takes=takes)
    return problem("E104", "deepspeed", seen, "", Fix(text=tr("--deepspeed takes {takes}", takes=takes)))


def _both(config: Config) -> Problem:
    seen = tr(
        "deepspeed is {deepspeed} and fsdp is {fsdp}, but only one of them can shard the model.",
        deepspeed=config.deepspeed,
        fsdp=config.fsdp,
    )
    deepspeed = Fix(text=tr("shard with DeepSpeed"), edits={"fsdp": None})
    fsdp = Fix(text=tr("shard with FSDP"), edits={"deepspeed": None})
    return problem("E115", "fsdp", seen, "", deepspeed, fsdp)


def _stage_2(asked: str) -> Problem:
    seen = tr("{asked} asks for ZeRO-1; in bfloat16 covey runs ZeRO-2 instead.", asked=asked)
    fix = Fix(
        text=tr("no action is needed; this value names the stage that runs anyway"),
        edits={"deepspeed": "zero2"},
    )
    return warning("W119", "deepspeed", seen, "", fix)
