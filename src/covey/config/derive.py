"""The options that follow from others when nobody types them.

Pure arithmetic on what was typed. Whether the outcome is a batch that can run is the business of
`covey.plan`; here even a contradiction comes out as numbers, so that the plan can say what is wrong with
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from covey.algorithm.loss_types.registry import LOSSES
from covey.options.schema import default_of
from covey.options.vllm import LORA_RANKS, VllmOptions
from covey.texts import counted, tr

PER_DEVICE = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
PER_GENERATION = "steps_per_generation"
GENERATION_BATCH = "generation_batch_size"

# One process takes eight forward passes of eight: eight prompts a step, since one often has no signal.
_DEFAULT_PASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The four batch options after derivation, and for each derived one the words for where it came from."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    generation_batch_size: int
    sources: Mapping[str, str]


def derive_batch(typed: Mapping[str, Any], num_processes: int) -> BatchOptions:
    """Return the batch options that `typed` (names to values, batch options or not) leads to."""
    per_device = typed.get(PER_DEVICE, default_of(PER_DEVICE))
    sources: dict[str, str] = {}
    if ACCUMULATION in typed:
        accumulation = typed[ACCUMULATION]
    elif {PER_DEVICE, PER_GENERATION, GENERATION_BATCH} & set(typed):
        accumulation = 1
        sources[ACCUMULATION] = "default"
    else:
        accumulation = max(1, _DEFAULT_PASSES // num_processes)
        sources[ACCUMULATION] = tr("default for {processes}", processes=counted(num_processes, "process"))
    per_pass = max(1, num_processes * per_device)
    if PER_GENERATION in typed:
        per_generation = typed[PER_GENERATION]
    elif GENERATION_BATCH in typed:
        per_generation = max(1, typed[GENERATION_BATCH] // per_pass)
        sources[PER_GENERATION] = tr("derived from {generation_batch}", generation_batch=GENERATION_BATCH)
    else:
        per_generation = accumulation
        sources[PER_GENERATION] = tr("derived from {accumulation}", accumulation=ACCUMULATION)
    generation_batch = typed.get(GENERATION_BATCH)
    if generation_batch is None:
        generation_batch = num_processes * per_device * per_generation
        sources[GENERATION_BATCH] = tr(
            "derived from {num_processes} x {per_device} x {per_generation}",
            num_processes=num_processes,
            per_device=PER_DEVICE,
            per_generation=PER_GENERATION,
        )
    return BatchOptions(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        generation_batch_size=generation_batch,
        sources=sources,
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """How one option follows from others: their names, and the value with the words for where it came
    from."""

    inputs: frozenset[str]
    derive: Callable[[Mapping[str, Any]], tuple[Any, str]]


EPSILON_HIGH = 0.28
"""The upper clipping distance when neither bound is typed."""

_SMALLER_IS_BETTER = ("loss", "kl", "entropy", "length", "clipped_ratio", "unknown_ids_ratio", "std", "_s")
_MOST_WORKERS = 8


def _of(options: Mapping[str, Any], name: str) -> Any:
    return options.get(name, default_of(name))


def _epsilon_high(options: Mapping[str, Any]) -> tuple[Any, str]:
    loss_type = _of(options, "loss_type")
    for loss in LOSSES.values():
        if loss.name == loss_type and loss.cap is not None:
            return loss.cap, tr("default with loss_type {loss_type}", loss_type=loss_type)
    if "epsilon" in options:
        return options["epsilon"], tr("derived from epsilon")
    return EPSILON_HIGH, "default"


def _scale_rewards(options: Mapping[str, Any]) -> tuple[Any, str]:
    estimator = _of(options, "advantage_estimator")
    if estimator == "grpo":
        return "group", "default"
    scale = {"rloo": "none", "reinforce_plus_plus": "batch"}[estimator]
    return scale, tr("default with advantage_estimator {estimator}", estimator=estimator)


def _learning_rate(options: Mapping[str, Any]) -> tuple[Any, str]:
    return (
        (1e-5, tr("default with tuner_type lora"))
        if _of(options, "tuner_type") == "lora"
        else (1e-6, "default")
    )


def _frozen_beside_adapters(options: Mapping[str, Any]) -> tuple[Any, str]:
    is_lora = _of(options, "tuner_type") == "lora"
    return is_lora, tr("default with tuner_type lora") if is_lora else "default"


def _reward_weights(options: Mapping[str, Any]) -> tuple[Any, str]:
    return [1.0] * sum(len(options.get(name, [])) for name in ("reward_funcs", "reward_model")), "default"


def _one_a_core(options: Mapping[str, Any]) -> tuple[Any, str]:
    cores = os.cpu_count() or 1
    return min(_MOST_WORKERS, cores), tr("default for {cores} cores", cores=cores)


def _eval_strategy(options: Mapping[str, Any]) -> tuple[Any, str]:
    if _of(options, "val_dataset") or _of(options, "split_dataset_ratio") > 0:
        return "steps", tr("default with prompts to evaluate on")
    return "no", tr("default without prompts to evaluate on")


def _greater_is_better(options: Mapping[str, Any]) -> tuple[Any, str]:
    metric = str(_of(options, "metric_for_best_model"))
    return not metric.endswith(_SMALLER_IS_BETTER), tr("derived from metric_for_best_model")


def _cosine(trl: float, ms_swift: float) -> Rule:
    """An end of the cosine for wrong answers: TRL's where only its name of the reward is typed."""

    def derive(options: Mapping[str, Any]) -> tuple[Any, str]:
        names = {str(name).removeprefix("trl.rewards.") for name in options.get("reward_funcs", [])}
        is_trls = _TRLS_COSINE in names and "cosine" not in names
        return (
            (trl, tr("default of {trls_cosine} in TRL", trls_cosine=_TRLS_COSINE))
            if is_trls
            else (ms_swift, "default")
        )

    return Rule(frozenset({"reward_funcs"}), derive)


_TRLS_COSINE = "get_cosine_scaled_reward"


def _soft_cache_length(options: Mapping[str, Any]) -> tuple[Any, str]:
    longest = options.get("soft_max_length", _of(options, "max_completion_length"))
    return max(1, longest // 5), tr("one fifth of soft_max_length")


_OF_VLLM = tuple(name for name in VllmOptions.model_fields if name.startswith("vllm_"))
_SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_SERVER_PORT = 8000


def _rollout_servers(options: Mapping[str, Any]) -> tuple[Any, str]:
    urls, hosts, ports = (_of(options, name) for name in _SERVERS)
    if urls:
        return [_plain_address(url) for url in urls], tr("derived from {servers}", servers=_SERVERS[0])
    if not hosts and not ports:
        return [], "default"
    pairs = (hosts or ["127.0.0.1"]), (ports or [_SERVER_PORT])
    longest = max(map(len, pairs))
    # Numbers that do not fit are a problem of the plan, which sees both lists.
    hosts, ports = (list(each) * longest if len(each) == 1 else list(each) for each in pairs)
    made = [f"http://{_host(host)}:{port}" for host, port in zip(hosts, ports, strict=False)]
    return made, tr("derived from {host} and {port}", host=_SERVERS[1], port=_SERVERS[2])


def _plain_address(url: str) -> str:
    """An address without the slash at its end."""
    return url.rstrip("/")


def _host(name: str) -> str:
    """A host to connect to: for every address of a machine, which a server may listen on, this machine."""
    try:
        address = ip_address(name)
    except ValueError:
        return name
    if address.is_unspecified:
        return "127.0.0.1"
    return f"[{name}]" if address.version == 6 else name


def _max_staleness(options: Mapping[str, Any]) -> tuple[Any, str]:
    return (1, tr("derived from async_generate")) if _of(options, "async_generate") else (0, "default")


def _quant_method(options: Mapping[str, Any]) -> tuple[Any, str]:
    return ("bnb", tr("derived from quant_bits")) if _of(options, "quant_bits") else (None, "default")


def _use_vllm(options: Mapping[str, Any]) -> tuple[Any, str]:
    typed = [name for name in _OF_VLLM if name in options]
    return bool(typed), tr("derived from {typed}", typed=typed[0]) if typed else "default"


def _sleeps(options: Mapping[str, Any]) -> tuple[Any, str]:
    return _of(options, "sleep_level") > 0, tr("derived from sleep_level")


_AHEAD = ("async_generate", "max_staleness")
_ADAPTER = (*_AHEAD, "tuner_type", "use_dora", "modules_to_save", "lora_rank", "freeze_vit", "freeze_aligner")


def _applies_adapter(options: Mapping[str, Any]) -> tuple[Any, str]:
    """Added to weights of bfloat16, most of a small update is rounded away; sent alone, it is whole. Engines
    apply adapters to the language model alone, and change none while completions run."""
    if _of(options, "tuner_type") != "lora" or any(options.get(name) for name in _AHEAD):
        return False, "default"
    is_plain = not _of(options, "use_dora") and not _of(options, "modules_to_save")
    # Adapters freeze both where nobody types them.
    is_plain = is_plain and all(options.get(name) is not False for name in ("freeze_vit", "freeze_aligner"))
    return is_plain and _of(options, "lora_rank") <= LORA_RANKS[-1], tr("derived from tuner_type")


def _same_as(name: str) -> Rule:
    return Rule(frozenset({name}), lambda options: (_of(options, name), tr("derived from {name}", name=name)))


RULES: Mapping[str, Rule] = {
    "epsilon_high": Rule(frozenset({"epsilon", "loss_type"}), _epsilon_high),
    "scale_rewards": Rule(frozenset({"advantage_estimator"}), _scale_rewards),
    "learning_rate": Rule(frozenset({"tuner_type"}), _learning_rate),
    "freeze_vit": Rule(frozenset({"tuner_type"}), _frozen_beside_adapters),
    "freeze_aligner": Rule(frozenset({"tuner_type"}), _frozen_beside_adapters),
    "reward_weights": Rule(frozenset({"reward_funcs", "reward_model"}), _reward_weights),
    "reward_workers": Rule(frozenset(), _one_a_core),
    "tool_workers": Rule(frozenset(), _one_a_core),
    "cosine_min_len_value_wrong": _cosine(trl=-1.0, ms_swift=-0.5),
    "cosine_max_len_value_wrong": _cosine(trl=-0.5, ms_swift=0.0),
    "cosine_max_len": _same_as("max_completion_length"),
    "soft_max_length": _same_as("max_completion_length"),
    "soft_cache_length": Rule(frozenset({"soft_max_length", "max_completion_length"}), _soft_cache_length),
    "data_seed": _same_as("seed"),
    "eval_strategy": Rule(frozenset({"val_dataset", "split_dataset_ratio"}), _eval_strategy),
    "eval_steps": _same_as("save_steps"),
    "eval_temperature": _same_as("temperature"),
    "eval_top_p": _same_as("top_p"),
    "eval_top_k": _same_as("top_k"),
    "eval_min_p": _same_as("min_p"),
    "quant_method": Rule(frozenset({"quant_bits"}), _quant_method),
    "use_vllm": Rule(frozenset(_OF_VLLM), _use_vllm),
    "vllm_enable_lora": Rule(frozenset(_ADAPTER), _applies_adapter),
    "vllm_enable_sleep_mode": Rule(frozenset({"sleep_level"}), _sleeps),
    "max_staleness": Rule(frozenset({"async_generate"}), _max_staleness),
    "rollout_servers": Rule(frozenset(_SERVERS), _rollout_servers),
    "greater_is_better": Rule(frozenset({"metric_for_best_model"}), _greater_is_better),
}
"""The rules of single options; those of the batch and of output_dir stand alone."""


def follows(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the value of `name` among resolved options is what its rule gives, so that nobody chose it."""
    rule = RULES[name]
    others = {n: v for n, v in options.items() if n != name}
    typed = {n: v for n, v in others.items() if n not in rule.inputs or v != default_of(n)}
    return options[name] in (rule.derive(others)[0], rule.derive(typed)[0])


def is_usual(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the value of `name` among resolved options is the one that it has when nobody types it."""
    return follows(name, options) if name in RULES else bool(options[name] == default_of(name))
