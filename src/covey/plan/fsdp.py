"""What `fsdp`, `fsdp_offload` and `fsdp_config` ask for together, in transformers' words and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.options.schema import Config
from covey.plan.layout import States
from covey.plan.problem import problem
from covey.texts import joined, tr
from covey.types import Fix, Problem

STRATEGIES: Mapping[str, int] = {
    "full_shard": 3,
    "fsdp2": 3,
    "hybrid_shard": 3,
    "shard_grad_op": 2,
    "hybrid_shard_zero2": 2,
    "off": 0,
    "no_shard": 0,
}
"""FSDP's strategies, each with the stage of ZeRO that shards as much."""

_HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
# Other words for strategies: transformers' switch, and the numbers of accelerate.
_MEANS = {
    **dict.fromkeys(("true", "1"), "full_shard"),
    **dict.fromkeys(("false", "none", "3"), "off"),
    **{"2": "shard_grad_op", "4": "hybrid_shard", "5": "hybrid_shard_zero2"},
}
# Words beside a strategy that ask for what is done in any case, but for `offload`.
_BESIDE = ("auto_wrap", "offload")
_OFFLOAD = ("offload_params", "cpu_offload")
# In the order in which they decide: FSDP1's, and FSDP2's of accelerate.
_STRATEGY, _RESHARD, _RECOMPUTE = "sharding_strategy", "reshard_after_forward", "activation_checkpointing"
# Settings of transformers and accelerate that change no number here: layers are found from the model, each
# rank reads its own weights, gradients are float32, and checkpoints are safetensors.
_WITHOUT_EFFECT = frozenset(
    {
        "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
        "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers",
        "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states", "state_dict_type",
        "mixed_precision_policy",
    }
)  # fmt: skip
# These ask for another machine where they are on.
_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")


def fsdp_states(config: Config) -> tuple[States, list[Problem]]:
    """Return where the states lie, with every problem of the three options."""
    settings, problems = _settings(config.fsdp_config or {})
    given = [_MEANS.get(word, word) for word in (config.fsdp or "").replace(",", " ").lower().split()]
    unknown = [word for word in given if word not in (*STRATEGIES, *_BESIDE)]
    named = [word for word in given if word in STRATEGIES]
    asked = _MEANS.get(settings.get(_STRATEGY, ""), settings.get(_STRATEGY, ""))
    if unknown or len(named) > 1 or (asked and asked not in STRATEGIES):
        problems.append(_unknown(unknown or (named if len(named) > 1 else [asked])))
        return States(), problems
    strategy = named[0] if named else "full_shard" if given else "off"
    if strategy != "off" and asked:
        strategy = asked
    kept = _MEANS.get(settings.get(_RESHARD, ""), settings.get(_RESHARD, ""))
    stage = STRATEGIES[strategy]
    if stage == 3 and kept in ("off", "shard_grad_op"):
        stage = 2
    offload = "offload" in given or config.fsdp_offload or any(settings.get(n) == "true" for n in _OFFLOAD)
    if offload and stage == 0:
        problems.append(_nothing_to_offload())
    is_recomputed = config.gradient_checkpointing in ("true", "selective")
    if settings.get(_RECOMPUTE) == "true" and stage and not is_recomputed:
        problems.append(_recompute())
    return States(
        stage=stage,
        offload="params" if offload and stage else "none",
        fsdp=stage > 0,
        is_hybrid=strategy in _HYBRID,
    ), problems


def _settings(written: Mapping[str, Any]) -> tuple[dict[str, str], list[Problem]]:
    """The settings under their names without `fsdp_` in front, in small letters."""
    settings = {n.removeprefix("fsdp_"): str(v).lower() for n, v in written.items() if v is not None}
    known = {*_OFFLOAD, _STRATEGY, _RESHARD, _RECOMPUTE}
    odd = [n for n in settings if n not in {*known, *_WITHOUT_EFFECT, *_XLA}]
    odd += [n for n in _XLA if settings.get(n, "false") not in ("false", "{}")]
    if not odd:
        return settings, []
    seen = tr("fsdp_config has {odd}, which covey does not know.", odd=joined(", ", sorted(odd)))
    words = tr("leave it out; the settings that covey reads are {known}", known=joined(", ", sorted(known)))
    cause = tr("The settings are of another tool, or of XLA.")
    return settings, [problem("E104", "fsdp_config", seen, cause, Fix(text=words))]


def _recompute() -> Problem:
    seen = tr(
        "fsdp_config asks for {recompute}. In covey this is the option gradient_checkpointing, which is off.",
        recompute=_RECOMPUTE,
    )
    on = Fix(text=tr("recompute activations in the backward pass"), edits={"gradient_checkpointing": "true"})
    return problem("E115", "gradient_checkpointing", seen, tr("The settings are of another tool."), on)


def _unknown(words: list[str]) -> Problem:
    takes = ", ".join(STRATEGIES)
    seen = tr(
        "fsdp has {words}; it takes one of {takes}, and in addition auto_wrap and offload.",
        words=joined(" ", words),
        takes=takes,
    )
    fix = Fix(text=tr("shard weights, gradients and optimizer state"), edits={"fsdp": "full_shard"})
    return problem("E104", "fsdp", seen, "", fix)


def _nothing_to_offload() -> Problem:
    seen = tr("fsdp_offload is on, but fsdp is off, so there are no shards to offload.")
    sharded = Fix(text=tr("shard the model"), edits={"fsdp": "full_shard"})
    whole = Fix(text=tr("do not shard it"), edits={"fsdp_offload": False})
    return problem("E115", "fsdp_offload", seen, tr("--fsdp is missing from the command."), sharded, whole)
