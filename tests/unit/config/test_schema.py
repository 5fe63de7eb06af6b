"""What holds of every declared option."""

import pytest
from pydantic import ValidationError

from covey.config import from_dict
from covey.config.foreign import MOOT, REFUSED
from covey.config.names import ALIASES, HINTS, look_up
from covey.config.values import kind_of
from covey.options.schema import (
    DERIVED,
    GROUPS,
    OPTIONS,
    Config,
    doc_of,
    group_of,
    rule_of,
)


def test_what_is_derived_has_a_rule_and_what_has_a_default_has_none() -> None:
    assert all(bool(rule_of(name)) == (name in DERIVED) for name in OPTIONS)


def test_each_option_has_help_a_group_and_a_kind() -> None:
    for name in OPTIONS:
        assert doc_of(name).endswith("."), name
        assert group_of(name) in GROUPS
        assert kind_of(name).words and kind_of(name).placeholder
    # Grouped options stand together, so that help and config.yaml have each heading once.
    assert list(dict.fromkeys(map(group_of, OPTIONS))) == list(GROUPS)


def test_a_configuration_cannot_be_changed_and_knows_no_other_names() -> None:
    config = from_dict({"model": "m", "dataset": ["d.jsonl"], "reward_funcs": ["accuracy"]}).config
    assert Config(**config.model_dump()) == config
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(**config.model_dump(), vllm_limit_per_prompt="h")


def test_other_names_do_not_hide_options() -> None:
    for table in (ALIASES, REFUSED, HINTS, MOOT):
        assert not set(table) & set(OPTIONS)
    assert not set(ALIASES) & set(REFUSED) and not set(MOOT) & set(REFUSED)
    assert set(ALIASES.values()) | set(HINTS.values()) <= set(OPTIONS)
    # A name is looked up before its beginning is: lora_rank is an option, and lora_dtype is refused.
    assert look_up("lora_rank").option == "lora_rank" and look_up("lora_dtype").refused
