"""docs/options.md: every option with its default beside those of TRL and ms-swift, and names that are none.

`python -m covey.config.reference` writes it to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from covey.config.dialect import MS_SWIFT
from covey.config.foreign import MOOT, REFUSED, REFUSED_PREFIXES
from covey.config.names import ALIASES, SWITCHES
from covey.config.schema import GROUPS, OPTIONS, REQUIRED, default_of, doc_of, group_of, rule_of
from covey.config.values import SPELLINGS, kind_of

NONE = "–"
"""Where a tool has no such option."""

FOREIGN: Mapping[str, tuple[str, str]] = {
    "model": ("required", "required"),
    "model_revision": ("main", "not set"),
    "use_hf": (NONE, "false"),
    "trust_remote_code": ("false", NONE),
    "torch_dtype": ("float32", "the model's own"),
    "disable_dropout": ("false", NONE),
    "attn_impl": ("sdpa", "the model's own"),
    "kernels": (NONE, NONE),
    "use_liger_kernel": ("false", "false"),
    "gradient_checkpointing": ("true", "true"),
    "activation_offloading": (NONE, NONE),
    "tuner_type": ("full", "lora"),
    "lora_rank": ("16", "8"),
    "lora_alpha": ("32", "32"),
    "lora_dropout": ("0.05", "0.05"),
    "target_modules": ("peft's", "all-linear"),
    "modules_to_save": ("none", "none"),
    "use_rslora": ("false", "false"),
    "use_dora": ("false", "false"),
    "dataset": ("required", "required"),
    "val_dataset": ("a split of the data set", "none"),
    "split_dataset_ratio": (NONE, "0"),
    "columns": (NONE, "not set"),
    "system": (NONE, "the template's own"),
    "dataset_shuffle": ("true", "true"),
    "interleave_prob": (NONE, "none"),
    "streaming": ("false", "false"),
    "task_column": (NONE, NONE),
    "pass_rates": (NONE, NONE),
    "pass_rate_column": (NONE, NONE),
    "min_pass_rate": (NONE, NONE),
    "max_pass_rate": (NONE, NONE),
    "curriculum": (NONE, NONE),
    "max_length": (NONE, "the model's context"),
    "truncation_strategy": (NONE, "left"),
    "apply_chat_template": (NONE, NONE),
    "chat_template": (NONE, "the model's own"),
    "enable_thinking": (NONE, "not set"),
    "chat_template_kwargs": ("not set", NONE),
    "reward_funcs": ("none", "none"),
    "reward_weights": ("all 1", "all 1"),
    "task_rewards": (NONE, NONE),
    "external_plugins": (NONE, "none"),
    "reward_model": ("none, within reward_funcs", "none"),
    "reward_model_revision": (NONE, "none"),
    "judge_base_url": (NONE, NONE),
    "judge_model": (NONE, NONE),
    "judge_prompt": (NONE, NONE),
    "judge_regex": (NONE, NONE),
    "judge_concurrency": (NONE, NONE),
    "judge_retries": (NONE, NONE),
    "judge_timeout_s": (NONE, NONE),
    "reward_timeout_s": (NONE, NONE),
    "reward_workers": (NONE, NONE),
    "reward_trial": (NONE, NONE),
    "max_bad_gold": (NONE, NONE),
    "unsafe_exec": (NONE, NONE),
    "completion_form": (NONE, NONE),
    "step_separator": (NONE, NONE),
    "cosine_min_len_value_wrong": ("-1", "-0.5"),
    "cosine_max_len_value_wrong": ("-0.5", "0"),
    "cosine_min_len_value_correct": ("1", "1"),
    "cosine_max_len_value_correct": ("0.5", "0.5"),
    "cosine_max_len": ("required", "max_completion_length"),
    "repetition_n_grams": ("3", "3"),
    "repetition_max_penalty": ("-1", "-1"),
    "soft_max_length": ("1280", "max_completion_length"),
    "soft_cache_length": ("256", "required"),
    "num_generations": ("8", "8"),
    "per_device_train_batch_size": ("8", "1"),
    "max_tokens_per_micro_batch": (NONE, NONE),
    "gradient_accumulation_steps": ("1", "1"),
    "steps_per_generation": ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    "generation_batch_size": ("from steps_per_generation", "from steps_per_generation"),
    "num_iterations": ("1", "1"),
    "max_completion_length": ("512", "512"),
    "temperature": ("1", "0.9"),
    "temperature_end": (NONE, NONE),
    "temperature_schedule": (NONE, NONE),
    "engine": ("generate of transformers", "generate of transformers"),
    "loss_type": ("dapo", "grpo"),
    "importance_sampling_level": ("token", "token"),
    "advantage_estimator": (NONE, "grpo"),
    "scale_rewards": ("group", "group; rloo none, reinforce_plus_plus batch"),
    "epsilon": ("0.2", "0.2"),
    "epsilon_end": (NONE, NONE),
    "epsilon_schedule": (NONE, NONE),
    "epsilon_high": ("epsilon", "epsilon"),
    "delta": ("not set", "not set"),
    "tau_pos": ("1", "1"),
    "tau_neg": ("1.05", "1.05"),
    "vespo_k_pos": ("2", NONE),
    "vespo_lambda_pos": ("3", NONE),
    "vespo_k_neg": ("3", NONE),
    "vespo_lambda_neg": ("2", NONE),
    "real_tau": (NONE, "0.5"),
    "fipo_decay_rate": (NONE, "32"),
    "fipo_clip_range": (NONE, "0.2"),
    "fipo_clip_high_only": (NONE, "true"),
    "fipo_safety_threshold": (NONE, "4"),
    "beta": ("0", "0.04"),
    "beta_end": (NONE, NONE),
    "beta_schedule": (NONE, NONE),
    "kl_estimator": (NONE, NONE),
    "kl_in_reward": (NONE, "false with grpo, else true"),
    "use_bias_correction_kl": ("true", "false"),
    "sync_ref_model": ("false", "false"),
    "ref_model_sync_steps": ("512", "512"),
    "ref_model_mixup_alpha": ("0.6", "0.6"),
    "entropy_coef": ("0", NONE),
    "entropy_coef_end": (NONE, NONE),
    "entropy_coef_schedule": (NONE, NONE),
    "use_adaptive_entropy": ("false", NONE),
    "entropy_target": ("0.2", NONE),
    "entropy_coef_delta": ("0.005", NONE),
    "entropy_coef_min": ("0", NONE),
    "entropy_coef_max": ("1", NONE),
    "top_entropy_quantile": ("1", "1"),
    "mask_truncated_completions": ("false", "false"),
    "dynamic_sample": (NONE, "false"),
    "max_resample_times": (NONE, "3"),
    "replay_buffer_size": ("64 in GRPOWithReplayBufferConfig", NONE),
    "off_policy_sequence_mask_delta": ("not set", "not set"),
    "rollout_importance_sampling_mode": (NONE, "not set"),
    "rollout_importance_sampling_threshold": (NONE, "2"),
    "vllm_importance_sampling_mode": ("sequence_mask", NONE),
    "vllm_importance_sampling_clip_max": ("3", NONE),
    "vllm_importance_sampling_clip_min": ("not set", NONE),
    "learning_rate": ("1e-6", "1e-4 lora, 1e-5 full"),
    "lr_scheduler_type": ("linear", "cosine"),
    "warmup_steps": ("0", "0"),
    "warmup_ratio": ("0", "0"),
    "adam_beta1": ("0.9", "0.9"),
    "adam_beta2": ("0.999", "0.95"),
    "adam_epsilon": ("1e-8", "1e-8"),
    "weight_decay": ("0", "0.1"),
    "max_grad_norm": ("1", "1"),
    "num_train_epochs": ("3", "3"),
    "max_steps": ("-1", "-1"),
    "stop_after_steps": (NONE, NONE),
    "max_minutes": (NONE, NONE),
    "seed": ("42", "42"),
    "data_seed": ("seed", "42"),
    "nproc_per_node": ("given to accelerate", "NPROC_PER_NODE"),
    "ignore_memory_forecast": (NONE, NONE),
    "eval_strategy": ("no", "save_strategy"),
    "eval_steps": ("logging_steps", "save_steps"),
    "eval_on_start": ("false", "false"),
    "num_generations_eval": ("num_generations", "num_generations"),
    "eval_temperature": (NONE, NONE),
    "load_best_model_at_end": ("false", "false"),
    "metric_for_best_model": ("loss", "reward"),
    "greater_is_better": ("from the metric", "from the metric"),
    "early_stopping_patience": (NONE, "not set"),
    "output_dir": ("trainer_output", "output/MODEL/vN-DATE"),
    "overwrite_output_dir": (NONE, NONE),
    "resume_from_checkpoint": ("not set", "not set"),
    "allow_changes": (NONE, NONE),
    "save_steps": ("500", "500"),
    "save_total_limit": ("all", "all"),
    "save_only_model": ("false", "false"),
    "keep_trainer_state": (NONE, NONE),
    "logging_steps": ("10", "5"),
    "report_to": ("none", "tensorboard"),
    "run_name": ("not set", "not set"),
    "log_completions": ("false", "false"),
    "rollout_log": (NONE, NONE),
    "rollout_log_max_gb": (NONE, NONE),
    "replay_rollouts": (NONE, NONE),
}
"""Of each option its default in TRL 1.16 and in ms-swift 4.6 with `--rlhf_type grpo`."""

TAKEN: frozenset[str] = frozenset({*MS_SWIFT, "learning_rate", "kl_in_reward"})
"""Options whose default `covey rlhf` takes from ms-swift."""

_HEAD = """\
# Options

Every option of `covey train` and `covey rlhf`, with its default. Made from the code by
`python -m covey.config.reference > docs/options.md`; `covey train --help` says the same.

- A flag is `--NAME VALUE` or `--NAME=VALUE`. Dashes or underscores, upper or lower case are all the same.
- A list takes several words, `--reward_funcs accuracy format`, or one with commas,
  `--reward_funcs accuracy,format`. A flag given twice replaces.
- A word that begins with a dash and is no flag is a value, `--system "- be brief"`;
  one that looks like a flag stands behind an equals sign, `--NAME=VALUE`.
- A switch is `--NAME`, `--NAME true`, `--NAME false` or `--no_NAME`.
- An option that takes an object takes JSON: `--columns '{"final": "solution"}'`.
- A YAML file holds the same names, flat or under the names of the groups below. Flags override it.
- From Python the options are keyword arguments of `covey.train`.

The columns TRL and ms-swift have the defaults of TRL 1.16 and of ms-swift 4.6 with `--rlhf_type grpo`.
`covey train` has the first column; `covey rlhf` has ms-swift's where it is **bold**, and the first elsewhere.
"–" means that the tool has no such option.
"""


_LATER = ("Other names", "Other words for values", "Accepted without effect", "Refused")


def markdown() -> str:
    """Return docs/options.md."""
    headings = [*GROUPS.values(), *_LATER]
    lines = [_HEAD, *(f"- [{heading}](#{_anchor(heading)})" for heading in headings)]
    for group, heading in GROUPS.items():
        names = [name for name in OPTIONS if group_of(name) == group]
        lines += ["", f"## {heading}", "", f"In a YAML file: `{group}`.", ""]
        lines += ["| option | default | TRL | ms-swift | what it is |", "|---|---|---|---|---|"]
        lines += [_row(name) for name in names]
    lines += _aliases() + _spellings() + _moot() + _refused()
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    plain = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return plain.replace(" ", "-")


def _row(name: str) -> str:
    trl, swift = FOREIGN[name]
    swift = f"**{swift}**" if name in TAKEN else swift
    return f"| `{name}` | {_default(name)} | {trl} | {swift} | {_cell(doc_of(name))}{_choices(name)} |"


def _choices(name: str) -> str:
    kind = kind_of(name)
    if not kind.choices or all(word in doc_of(name) for word in kind.choices):
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in kind.choices)}."


def _default(name: str) -> str:
    if name in REQUIRED:
        return "required"
    return _cell(rule_of(name)) or _value(default_of(name))


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, str) and value.isspace():
        return f"`{value.encode('unicode_escape').decode()}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _aliases() -> list[str]:
    by_option: dict[str, list[str]] = {}
    for alias, option in ALIASES.items():
        by_option.setdefault(option, []).append(alias)
    lines = ["", f"## {_LATER[0]}", "", "Names of TRL and ms-swift that mean one of the options above.", ""]
    lines += ["| type | for |", "|---|---|"]
    lines += [f"| {_quoted(aliases)} | `{option}` |" for option, aliases in by_option.items()]
    lines += [""]
    for name, (on, off) in SWITCHES.items():
        lines.append(
            f"`{name}` is a switch: true means `{ALIASES[name]} {on}`, false `{ALIASES[name]} {off}`."
        )
    return lines


def _spellings() -> list[str]:
    lines = ["", "## Other words for values", "", "| option | word | means |", "|---|---|---|"]
    for option, words in SPELLINGS.items():
        lines += [
            f"| `{option}` | `{word}` | {_value(value)} |"
            for word, value in words.items()
            if word != str(value)
        ]
    return lines


def _moot() -> list[str]:
    lines = ["", "## Accepted without effect", ""]
    lines += [
        "These names of TRL and ms-swift say what covey does anyway. They are accepted, and a note (W108)"
    ]
    lines += ["says so. Where values are listed, any other value is refused (E102).", ""]
    lines += ["| name | accepted values | what holds |", "|---|---|---|"]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, moot in MOOT.items():
        groups.setdefault((moot.words, moot.values), []).append(name)
    for (words, values), names in groups.items():
        lines.append(f"| {_quoted(names)} | {_quoted(values) or 'any'} | {_cell(words)} |")
    return lines


def _refused() -> list[str]:
    lines = ["", "## Refused", ""]
    lines += [
        "These names of TRL and ms-swift are refused (E102), because ignoring them would give another run.",
        "",
    ]
    lines += ["| name | why, or what to do instead |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for name, words in REFUSED.items():
        groups.setdefault(words, []).append(name)
    for prefix, words in REFUSED_PREFIXES.items():
        groups.setdefault(words, []).append(f"{prefix}…")
    lines += [f"| {_quoted(names)} | {_cell(words)} |" for words, names in groups.items()]
    return [*lines, "", "Any other name is unknown (E101), and the nearest option is named."]


if __name__ == "__main__":
    sys.stdout.write(markdown())
