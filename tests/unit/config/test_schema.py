"""What holds of every declared option."""

import pytest
from pydantic import ValidationError

from covey.config.foreign import MOOT, REFUSED
from covey.config.names import ALIASES, HINTS, look_up
from covey.config.values import kind_of
from covey.options.schema import (
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


def test_what_is_derived_has_a_rule_and_what_has_a_default_has_none() -> None:
    assert sorted(DERIVED) == [
        "cosine_max_len",
        "cosine_max_len_value_wrong",
        "cosine_min_len_value_wrong",
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
        "quant_method",
        "reward_weights",
        "reward_workers",
        "rollout_servers",
        "scale_rewards",
        "soft_cache_length",
        "soft_max_length",
        "steps_per_generation",
        "use_vllm",
        "vllm_enable_lora",
        "vllm_enable_sleep_mode",
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
    defaults = {name: default_of(name) for name in OPTIONS if name not in (*REQUIRED, *DERIVED)}
    values = defaults | {
        "model": "m",
        "dataset": ["d.jsonl"],
        "reward_funcs": ["accuracy"],
        "reward_weights": [1.0],
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
        "generation_batch_size": 64,
        "epsilon_high": 0.28,
        "scale_rewards": "group",
        "learning_rate": 1e-6,
        "reward_workers": 2,
        "cosine_min_len_value_wrong": -0.5,
        "cosine_max_len_value_wrong": 0.0,
        "cosine_max_len": 1024,
        "soft_max_length": 1024,
        "soft_cache_length": 204,
        "eval_strategy": "no",
        "eval_steps": 100,
        "eval_temperature": 1.0,
        "greater_is_better": True,
        "data_seed": 42,
        "output_dir": "runs/a",
        "quant_method": None,
        "rollout_servers": [],
        "use_vllm": False,
        "vllm_enable_lora": False,
        "vllm_enable_sleep_mode": False,
    }
    config = Config(**values)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(**values, vllm_limit_mm_per_prompt="h")


def test_other_names_do_not_hide_options() -> None:
    for table in (ALIASES, REFUSED, HINTS, MOOT):
        assert not set(table) & set(OPTIONS)
    assert not set(ALIASES) & set(REFUSED) and not set(MOOT) & set(REFUSED)
    assert set(ALIASES.values()) | set(HINTS.values()) <= set(OPTIONS)
    assert len(REFUSED) + len(MOOT) >= 90
    # A name is looked up before its beginning is: lora_rank is an option, and lora_bias is refused.
    assert look_up("lora_rank").option == "lora_rank" and look_up("lora_bias").refused
