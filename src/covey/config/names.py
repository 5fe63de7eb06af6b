"""The names people type: our own, and those of TRL and ms-swift for the same thing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from covey.config.foreign import MOOT, REFUSED, REFUSED_PREFIXES, Moot
from covey.config.schema import GROUPS, OPTIONS

ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model",
    "model_id_or_path": "model",
    "dtype": "torch_dtype",
    "bf16": "torch_dtype",
    "attn_implementation": "attn_impl",
    "dataset_name": "dataset",
    "shuffle_dataset": "dataset_shuffle",
    "max_prompt_length": "max_length",
    "max_new_tokens": "max_completion_length",
    "response_length": "max_completion_length",
    "overlong_filter": "mask_truncated_completions",
    "off_policy_mask_threshold": "off_policy_sequence_mask_delta",
    "sapo_temperature_pos": "tau_pos",
    "sapo_temperature_neg": "tau_neg",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "use_peft": "tuner_type",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "dataset_seed": "data_seed",
    "early_stop_interval": "early_stopping_patience",
    "max_epochs": "num_train_epochs",
    "revision": "model_revision",
    "reward_functions": "reward_funcs",
    "reward_model_name_or_path": "reward_model",
}
"""Names that mean one of our options; `bf16` and `use_peft` take true or false, see `switch_value`."""

HINTS: Mapping[str, str] = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "group_size": "num_generations",
    "n": "num_generations",
    "max_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "kl_coef": "beta",
    "rewards": "reward_funcs",
    "data": "dataset",
    "train_files": "dataset",
    "out": "output_dir",
    "resume": "resume_from_checkpoint",
    "nproc": "nproc_per_node",
    "num_processes": "nproc_per_node",
    "clip_ratio": "epsilon",
    "kl_loss_type": "kl_estimator",
}
"""What a name of other tools most likely means; offered as a suggestion, never taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What a typed name is: an option, a name that says what is done anyway, a refused one with the reason,
    or unknown with the nearest option."""

    typed: str
    option: str | None = None
    moot: Moot | None = None
    refused: str | None = None
    nearest: str | None = None


def normalise(name: str) -> str:
    """Return a name as options are written: lower case, underscores, no leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def look_up(name: str) -> Name:
    """Say what a typed name is."""
    plain = normalise(name)
    if plain in OPTIONS:
        return Name(typed=plain, option=plain)
    if plain in ALIASES:
        return Name(typed=plain, option=ALIASES[plain])
    if plain in MOOT:
        return Name(typed=plain, moot=MOOT[plain])
    if plain in REFUSED:
        return Name(typed=plain, refused=REFUSED[plain])
    for prefix, words in REFUSED_PREFIXES.items():
        if plain.startswith(prefix):
            return Name(typed=plain, refused=words)
    return Name(typed=plain, nearest=nearest_option(plain))


def nearest_option(plain: str) -> str | None:
    """Return the option whose name or alias is nearest to an unknown one; None if none is near."""
    if plain in HINTS:
        return HINTS[plain]
    match = nearest(plain, [*OPTIONS, *ALIASES])
    return ALIASES.get(match, match) if match else None


def nearest_group(plain: str) -> str | None:
    """Return the section of a configuration file whose name is nearest."""
    return nearest(plain, list(GROUPS))


def nearest(word: str, words: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """Return the word most like `word`, underscores and case aside; None if none is near."""
    plain = {w.lower().replace("_", ""): w for w in words}
    matches = difflib.get_close_matches(
        word.lower().replace("_", "").replace("-", ""), list(plain), n=1, cutoff=cutoff
    )
    return plain[matches[0]] if matches else None


SWITCHES: Mapping[str, tuple[str, str]] = {"bf16": ("bfloat16", "float32"), "use_peft": ("lora", "full")}
"""Names that take true or false and mean a word of an option."""


def switch_value(typed: str, value: object) -> object:
    """Return what `bf16 VALUE` or `use_peft VALUE` says about its option; other words as they are."""
    if typed not in SWITCHES:
        return value
    on, off = SWITCHES[typed]
    word = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    plain = str(word).lower()
    return (
        on if plain in ("true", "yes", "on", "1") else off if plain in ("false", "no", "off", "0") else value
    )
