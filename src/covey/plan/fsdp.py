"""What `fsdp`, `fsdp_offload` and `fsdp_config` ask for together, in transformers' words and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.options.schema import Config
from covey.plan.layout import States
from covey.plan.problem import problem
from covey.types import Fix, Problem

STRATEGIES: Mapping[str, int] = {
    "full_shard": 3,
    "fsdp2": 3,
    "hybrid_shard": 3,
    "shard_grad_op": 2,
    "off": 0,
    "no_shard": 0,
}
"""FSDP's strategies, each with the stage of ZeRO that shards as much."""

# Words beside a strategy that ask for what is done in any case, but for `offload`.
_BESIDE = ("auto_wrap", "offload")
_OFFLOAD = ("offload_params", "cpu_offload")
_RESHARD = "reshard_after_forward"
# Settings of transformers and accelerate that change no number here: layers are found from the model, each
# rank reads its own weights, gradients are float32, and checkpoints are safetensors.
_WITHOUT_EFFECT = frozenset(
    {
        "version", "fsdp_version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
        "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers",
        "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states", "state_dict_type",
        "activation_checkpointing", "mixed_precision_policy",
    }
)  # fmt: skip


def fsdp_states(config: Config) -> tuple[States, list[Problem]]:
    """Return where the states lie, with every problem of the three options."""
    given = (config.fsdp or "").replace(",", " ").lower().split()
    settings, problems = _settings(config.fsdp_config or {})
    unknown = [word for word in given if word not in (*STRATEGIES, *_BESIDE)]
    named = [word for word in given if word in STRATEGIES]
    if unknown or len(named) > 1:
        problems.append(_unknown(unknown or named))
        return States(), problems
    strategy = named[0] if named else "full_shard" if given else "off"
    stage = STRATEGIES[strategy]
    offload = "offload" in given or config.fsdp_offload or any(settings.get(n) for n in _OFFLOAD)
    if offload and stage == 0:
        problems.append(_nothing_to_offload())
    if settings.get(_RESHARD) in (False, "SHARD_GRAD_OP") and stage == 3:
        stage = 2
    return States(
        stage=stage,
        offload="params" if offload and stage else "none",
        fsdp=stage > 0,
        is_hybrid=strategy == "hybrid_shard",
    ), problems


def _settings(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The settings under their names without `fsdp_` in front."""
    settings = {name.removeprefix("fsdp_"): value for name, value in written.items()}
    odd = sorted(n for n in settings if n not in {*_OFFLOAD, _RESHARD, *_WITHOUT_EFFECT})
    if not odd:
        return settings, []
    seen = f"fsdp_config has {', '.join(odd)}, which covey does not know."
    known = ", ".join(sorted({*_OFFLOAD, _RESHARD}))
    fix = Fix(text=f"leave it out; of fsdp_config {known} are read, and what has no effect here is taken")
    return settings, [problem("E104", "fsdp_config", seen, "Settings of another tool, or XLA's.", fix)]


def _unknown(words: list[str]) -> Problem:
    takes = ", ".join(STRATEGIES)
    seen = f"fsdp has {' '.join(words)}; it takes one of {takes}, and auto_wrap and offload beside it."
    fix = Fix(text="all of it is split", edits={"fsdp": "full_shard"})
    return problem("E104", "fsdp", seen, "A slip of the hand, or the spelling of another tool.", fix)


def _nothing_to_offload() -> Problem:
    seen = "fsdp_offload is on, and nothing is sharded: fsdp is off."
    sharded = Fix(text="split the model", edits={"fsdp": "full_shard"})
    whole = Fix(text="keep it whole", edits={"fsdp_offload": False})
    return problem("E115", "fsdp_offload", seen, "A part of a command that was left out.", sharded, whole)
