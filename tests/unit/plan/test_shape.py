"""How many tokens a forward pass holds."""

from __future__ import annotations

import pytest

from covey.config.resolve import from_dict
from covey.options.schema import Config
from covey.plan.shape import tokens_per_pass


def config_of(**options: object) -> Config:
    base = {"model": "m", "dataset": ["d"], "reward_funcs": ["accuracy"]}
    sizes = {"per_device_train_batch_size": 8, "max_completion_length": 500}
    return from_dict({**base, **sizes, **options}).config


@pytest.mark.parametrize(
    ("cpu_model", "tokens"),
    [
        (None, 8 * 520),
        ((128, 4), 4096),  # a CPU gains from no larger pass, however small the model is
        ((32, 2), 4096),
        ((512, 12), 2**23 // 6144),
        ((2**24, 1), 1),
    ],
)
def test_rows_of_the_longest_prompt_and_completion_or_what_a_cpu_gains_from(cpu_model, tokens):
    assert tokens_per_pass(config_of(), longest_prompt=20, cpu_model=cpu_model) == tokens


def test_rows_of_a_small_model_decide_up_to_there():
    config = config_of(max_completion_length=492)
    assert tokens_per_pass(config, longest_prompt=19, cpu_model=(128, 4)) == 8 * 511
    assert tokens_per_pass(config, longest_prompt=21, cpu_model=(128, 4)) == 4096


def test_a_pass_of_a_large_model_on_a_cpu_has_room_beside_a_long_prompt():
    options = {"per_device_train_batch_size": 8, "max_completion_length": 64}
    assert tokens_per_pass(config_of(**options), longest_prompt=1000, cpu_model=(512, 12)) == 4000
    # An outlier among short prompts takes no more than four times the limit.
    assert tokens_per_pass(config_of(**options), longest_prompt=9000, cpu_model=(512, 12)) == 4 * 1365
    one = config_of(**options | {"per_device_train_batch_size": 1})
    assert tokens_per_pass(one, longest_prompt=1000, cpu_model=(512, 12)) == 1064


@pytest.mark.parametrize("cpu_model", [None, (512, 12)])
@pytest.mark.parametrize("typed", [1, 100_000])
def test_what_is_typed_holds(cpu_model, typed):
    config = config_of(max_tokens_per_micro_batch=typed)
    assert tokens_per_pass(config, longest_prompt=20, cpu_model=cpu_model) == typed
