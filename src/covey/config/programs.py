"""The options of a Python program: plain values for enumerations, and whole configurations of TRL."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

# Every GRPOConfig of TRL has these fields, and no configuration of covey has all of them.
_OF_GRPO_CONFIG = frozenset(
    {"use_vllm", "vllm_mode", "vllm_server_host", "vllm_importance_sampling_correction", "do_predict"}
)
_OF_MODELS = {"revision": "model_revision", "attn_implementation": "attn_impl"}
# What says where the weights lie while they are loaded; covey moves them to its device.
_OF_LOADING = ("device_map", "low_cpu_mem_usage", "use_cache")
_OF_EVALUATIONS = ("eval_on_start", "eval_steps", "num_generations_eval")


def is_whole_config(options: Mapping[str, Any]) -> bool:
    """Whether all fields of a GRPOConfig are among the options, as in `train(**vars(config))`."""
    return options.keys() >= _OF_GRPO_CONFIG


def of_program(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with plain values in the place of enumerations. Of a whole GRPOConfig without the fields
    that TRL does not read: those of vLLM where it is not used, those of a server where there is none, those
    of a correction that is off, those of evaluations where nothing is evaluated, and those of uploads where
    nothing is uploaded."""
    values = {name: value.value if isinstance(value, Enum) else value for name, value in options.items()}
    if isinstance(values.get("model_init_kwargs"), Mapping):
        values |= _of_model(values.pop("model_init_kwargs"))
    if not is_whole_config(options):
        return values
    own = values.pop("covey_options", None) or {}
    values = _as_meant(values)
    unread: tuple[str, ...] = ()
    if values.get("eval_strategy") in ("no", None):
        unread = _OF_EVALUATIONS
    if not values.get("push_to_hub"):
        unread += ("hub_",)
    if not values["use_vllm"]:
        unread += ("vllm_",)
    elif values["vllm_mode"] != "server":
        unread += ("vllm_server_", "vllm_group_port")
    if not values["vllm_importance_sampling_correction"]:
        unread += ("vllm_importance_sampling_",)
    return {**{name: value for name, value in values.items() if not name.startswith(unread)}, **own}


def _as_meant(values: dict[str, Any]) -> dict[str, Any]:
    """The fields with what some mean in TRL: a fraction of `warmup_steps` is a share of all steps; where they
    are not set, evaluations sample as many completions as training, and both sides are clipped alike. The
    older name of a bound is that bound."""
    changes: dict[str, Any] = {}
    if isinstance(values.get("warmup_steps"), float) and 0 < values["warmup_steps"] < 1:
        changes |= {"warmup_steps": 0, "warmup_ratio": values["warmup_steps"]}
    if values.get("vllm_importance_sampling_cap") is not None:
        changes["vllm_importance_sampling_clip_max"] = values["vllm_importance_sampling_cap"]
    for name, other in (("num_generations_eval", "num_generations"), ("epsilon_high", "epsilon")):
        if values.get(name) is None:
            changes[name] = values.get(other)
    values = {**values, **changes}
    values.pop("vllm_importance_sampling_cap", None)
    return values


def _of_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that arguments of `from_pretrained` mean, without those that are None. A dtype of float32
    is that of the weights that an optimizer steps, which covey has always."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in _OF_LOADING:
            continue
        if name in ("dtype", "torch_dtype"):
            word = str(value).removeprefix("torch.")
            options |= {} if word in ("auto", "float32") else {"torch_dtype": word}
        elif name in _OF_MODELS:
            options[_OF_MODELS[name]] = value
        else:
            known = name in ("trust_remote_code", "quantization_config")
            options[name if known else f"model_init_kwargs.{name}"] = value
    return options
