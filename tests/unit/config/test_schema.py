"""The options, their order and their defaults: adding one is a visible decision."""

import pytest
from pydantic import ValidationError

from covey.config.foreign import MOOT, REFUSED
from covey.config.names import ALIASES, HINTS, look_up
from covey.config.schema import (
    DERIVED,
    GROUPS,
    OPTIONS,
    REQUIRED,
    Config,
    default_of,
    doc_of,
    group_of,
    rule_of,
)
from covey.config.values import kind_of

PINNED = [
    "activation_offloading",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "allow_changes",
    "apply_chat_template",
    "attn_impl",
    "beta",
    "chat_template",
    "chat_template_kwargs",
    "columns",
    "completion_form",
    "data_seed",
    "dataset",
    "dataset_shuffle",
    "delta",
    "disable_dropout",
    "early_stopping_patience",
    "enable_thinking",
    "engine",
    "epsilon",
    "epsilon_high",
    "eval_on_start",
    "eval_steps",
    "eval_strategy",
    "eval_temperature",
    "external_plugins",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "greater_is_better",
    "interleave_prob",
    "keep_trainer_state",
    "learning_rate",
    "load_best_model_at_end",
    "log_completions",
    "logging_steps",
    "lora_alpha",
    "lora_dropout",
    "lora_rank",
    "loss_type",
    "lr_scheduler_type",
    "mask_truncated_completions",
    "max_bad_gold",
    "max_completion_length",
    "max_grad_norm",
    "max_length",
    "max_minutes",
    "max_steps",
    "max_tokens_per_micro_batch",
    "metric_for_best_model",
    "model",
    "model_revision",
    "modules_to_save",
    "nproc_per_node",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "num_train_epochs",
    "output_dir",
    "overwrite_output_dir",
    "per_device_train_batch_size",
    "replay_rollouts",
    "report_to",
    "resume_from_checkpoint",
    "reward_funcs",
    "reward_timeout_s",
    "reward_trial",
    "reward_weights",
    "reward_workers",
    "rollout_log",
    "rollout_log_max_gb",
    "run_name",
    "save_only_model",
    "save_steps",
    "save_total_limit",
    "scale_rewards",
    "seed",
    "split_dataset_ratio",
    "steps_per_generation",
    "stop_after_steps",
    "streaming",
    "system",
    "target_modules",
    "temperature",
    "torch_dtype",
    "truncation_strategy",
    "trust_remote_code",
    "tuner_type",
    "unsafe_exec",
    "use_bias_correction_kl",
    "use_dora",
    "use_hf",
    "use_liger_kernel",
    "use_rslora",
    "val_dataset",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
]

DEFAULTS = {
    "model_revision": None,
    "use_hf": True,
    "trust_remote_code": False,
    "torch_dtype": "auto",
    "disable_dropout": True,
    "attn_impl": "auto",
    "use_liger_kernel": "auto",
    "gradient_checkpointing": "auto",
    "activation_offloading": False,
    "tuner_type": "full",
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.0,
    "target_modules": ["all-linear"],
    "modules_to_save": [],
    "use_rslora": False,
    "use_dora": False,
    "val_dataset": [],
    "split_dataset_ratio": 0.0,
    "columns": None,
    "system": None,
    "dataset_shuffle": True,
    "interleave_prob": [],
    "streaming": False,
    "max_length": None,
    "truncation_strategy": "delete",
    "apply_chat_template": False,
    "chat_template": None,
    "enable_thinking": None,
    "chat_template_kwargs": None,
    "external_plugins": [],
    "reward_timeout_s": 60.0,
    "reward_trial": True,
    "max_bad_gold": 0.05,
    "unsafe_exec": False,
    "completion_form": "auto",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "num_iterations": 1,
    "max_completion_length": 1024,
    "temperature": 1.0,
    "engine": "native",
    "loss_type": "dapo",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 1.0,
    "max_steps": -1,
    "max_tokens_per_micro_batch": None,
    "stop_after_steps": None,
    "max_minutes": None,
    "seed": 42,
    "nproc_per_node": 1,
    "eval_on_start": True,
    "num_generations_eval": 1,
    "load_best_model_at_end": False,
    "metric_for_best_model": "eval_reward",
    "early_stopping_patience": None,
    "overwrite_output_dir": False,
    "resume_from_checkpoint": None,
    "allow_changes": False,
    "save_steps": 100,
    "save_total_limit": 2,
    "save_only_model": False,
    "keep_trainer_state": 1,
    "logging_steps": 1,
    "report_to": ["none"],
    "run_name": None,
    "log_completions": 0,
    "rollout_log": "all",
    "rollout_log_max_gb": 10.0,
    "replay_rollouts": None,
}


def test_the_options_are_these() -> None:
    assert sorted(OPTIONS) == PINNED


def test_the_defaults_are_these() -> None:
    assert {name: default_of(name) for name in OPTIONS if name not in (*REQUIRED, *DERIVED)} == DEFAULTS


def test_what_is_derived_has_a_rule_and_what_has_a_default_has_none() -> None:
    assert sorted(DERIVED) == [
        "data_seed",
        "epsilon_high",
        "eval_steps",
        "eval_strategy",
        "eval_temperature",
        "generation_batch_size",
        "gradient_accumulation_steps",
        "greater_is_better",
        "learning_rate",
        "output_dir",
        "reward_weights",
        "reward_workers",
        "steps_per_generation",
    ]
    assert all(bool(rule_of(name)) == (name in DERIVED) for name in OPTIONS)


def test_each_option_has_help_a_group_and_a_kind() -> None:
    for name in OPTIONS:
        assert doc_of(name).endswith("."), name
        assert group_of(name) in GROUPS
        assert kind_of(name).words and kind_of(name).placeholder
    # Grouped options stand together, so that help and config.yaml have each heading once.
    assert list(dict.fromkeys(map(group_of, OPTIONS))) == list(GROUPS)


def test_a_configuration_cannot_be_changed_and_knows_no_other_names() -> None:
    values = DEFAULTS | {
        "model": "m",
        "dataset": ["d.jsonl"],
        "reward_funcs": ["accuracy"],
        "reward_weights": [1.0],
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
        "generation_batch_size": 64,
        "epsilon_high": 0.28,
        "learning_rate": 1e-6,
        "reward_workers": 2,
        "eval_strategy": "no",
        "eval_steps": 100,
        "eval_temperature": 1.0,
        "greater_is_better": True,
        "data_seed": 42,
        "output_dir": "runs/a",
    }
    config = Config(**values)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(**values, vllm_mode="colocate")


def test_other_names_do_not_hide_options() -> None:
    for table in (ALIASES, REFUSED, HINTS, MOOT):
        assert not set(table) & set(OPTIONS)
    assert not set(ALIASES) & set(REFUSED) and not set(MOOT) & set(REFUSED)
    assert set(ALIASES.values()) | set(HINTS.values()) <= set(OPTIONS)
    assert len(REFUSED) + len(MOOT) >= 100
    # A name is looked up before its beginning is: lora_rank is an option, and lora_bias is refused.
    assert look_up("lora_rank").option == "lora_rank" and look_up("lora_bias").refused
