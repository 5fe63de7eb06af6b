"""The options, their order and their defaults: adding one is a visible decision."""

import pytest
from pydantic import ValidationError

from covey.config.names import ALIASES, HINTS, REFUSED, REFUSED_PREFIXES
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
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "allow_changes",
    "beta",
    "data_seed",
    "dataset",
    "dataset_shuffle",
    "delta",
    "disable_dropout",
    "engine",
    "epsilon",
    "epsilon_high",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "keep_trainer_state",
    "learning_rate",
    "logging_steps",
    "loss_type",
    "lr_scheduler_type",
    "mask_truncated_completions",
    "max_completion_length",
    "max_grad_norm",
    "max_length",
    "max_steps",
    "model",
    "nproc_per_node",
    "num_generations",
    "num_iterations",
    "num_train_epochs",
    "output_dir",
    "overwrite_output_dir",
    "per_device_train_batch_size",
    "replay_rollouts",
    "resume_from_checkpoint",
    "reward_funcs",
    "reward_weights",
    "rollout_log",
    "rollout_log_max_gb",
    "save_only_model",
    "save_steps",
    "save_total_limit",
    "scale_rewards",
    "seed",
    "steps_per_generation",
    "stop_after_steps",
    "temperature",
    "torch_dtype",
    "use_bias_correction_kl",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
]

DEFAULTS = {
    "torch_dtype": "auto",
    "disable_dropout": True,
    "gradient_checkpointing": False,
    "dataset_shuffle": True,
    "max_length": None,
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
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 1.0,
    "max_steps": -1,
    "stop_after_steps": None,
    "seed": 42,
    "nproc_per_node": 1,
    "overwrite_output_dir": False,
    "resume_from_checkpoint": None,
    "allow_changes": False,
    "save_steps": 100,
    "save_total_limit": 2,
    "save_only_model": False,
    "keep_trainer_state": 1,
    "logging_steps": 1,
    "rollout_log": "all",
    "rollout_log_max_gb": 10.0,
    "replay_rollouts": None,
}


def test_the_options_are_these() -> None:
    assert sorted(OPTIONS) == PINNED


def test_the_defaults_are_these() -> None:
    assert {name: default_of(name) for name in OPTIONS if name not in (*REQUIRED, *DERIVED)} == DEFAULTS


def test_what_is_derived_has_a_rule_and_what_has_a_default_has_none() -> None:
    assert set(DERIVED) == {
        "reward_weights",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "epsilon_high",
        "data_seed",
        "output_dir",
    }
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
        "data_seed": 42,
        "output_dir": "runs/a",
    }
    config = Config(**values)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(**values, vllm_mode="colocate")


def test_other_names_do_not_hide_options() -> None:
    for table in (ALIASES, REFUSED, HINTS):
        assert not set(table) & set(OPTIONS)
    assert not set(ALIASES) & set(REFUSED)
    assert set(ALIASES.values()) | set(HINTS.values()) <= set(OPTIONS)
    assert len(REFUSED) >= 60
    assert not [name for name in (*OPTIONS, *ALIASES) if name.startswith(tuple(REFUSED_PREFIXES))]
