"""The arithmetic of a batch by hand-worked numbers, and its refusals."""

from typing import Any

import pytest

from covey.checks.batch import batch_plan
from covey.config import from_dict
from covey.errors import ConfigError
from covey.options.schema import Config

B, A, S, G = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
)


def config(world_size: int = 1, **options: Any) -> Config:
    base = {"model": "m", "dataset": "d.jsonl", "reward_funcs": "accuracy", "output_dir": "o"}
    found = from_dict({**base, **options}, world_size)
    assert found.problems == ()
    return found.config


def numbers(n: int, b: int, a: int, s: int, g: int, mu: int = 1, **more: Any) -> Config:
    return config(n, **{B: b, A: a, S: s, G: g, "num_iterations": mu}, **more)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # N, B, A, S, G, mu -> completions per step, completions and prompts per rollout, steps per rollout
        ((1, 1, 8, 8, 8, 1), (8, 8, 1, 1)),
        ((1, 2, 2, 2, 4, 1), (4, 4, 1, 1)),
        ((2, 1, 32, 32, 8, 1), (64, 64, 8, 1)),
        ((8, 4, 8, 16, 64, 1), (256, 512, 8, 2)),
        ((7, 1, 8, 8, 8, 1), (56, 56, 7, 1)),
        ((1, 8, 8, 8, 8, 3), (64, 64, 8, 3)),
        ((2, 4, 1, 4, 8, 2), (8, 32, 4, 8)),
    ],
)
def test_numbers(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    plan = batch_plan(numbers(*shape), shape[0])
    assert expected == (
        plan.completions_per_step,
        plan.completions_per_rollout,
        plan.prompts_per_rollout,
        plan.steps_per_rollout,
    )
    assert plan.on_policy == (plan.steps_per_rollout == 1)
    assert plan.total_steps is None


@pytest.mark.parametrize(
    ("shape", "num_prompts", "code"),
    [
        ((7, 1, 1, 1, 8), None, "E202"),
        ((4, 1, 1, 1, 8), None, "E202"),
        ((1, 1, 1, 1, 1), None, "E201"),  # before divisibility
        ((3, 2, 4, 3, 6), None, "E206"),
        ((1, 8, 2, 3, 8), None, "E205"),
        ((1, 8, 8, 4, 8, 2), None, "E206"),
        ((1, 8, 8, 8, 8), 7, "E207"),
        ((1, 0, 1, 1, 8), None, "E208"),
        ((1, 8, 1, 1, 8, 0), None, "E208"),
        ((1, 10**10, 1, 1, 8), None, "E208"),
    ],
)
def test_refusals(shape: tuple[int, ...], num_prompts: int | None, code: str) -> None:
    with pytest.raises(ConfigError) as error:
        batch_plan(numbers(*shape), shape[0], num_prompts)
    assert error.value.problems[0].code == code
    assert all(problem.fixes for problem in error.value.problems)


def test_epochs_are_whole_rollouts() -> None:
    plan = batch_plan(numbers(1, 8, 4, 8, 8, 2, num_train_epochs=2.5), 1, 100)
    assert (plan.prompts_per_rollout, plan.rollouts_per_epoch, plan.dropped_prompts_per_epoch) == (8, 12, 4)
    assert (plan.steps_per_rollout, plan.steps_per_epoch) == (4, 48)
    assert plan.total_steps == 30 * 4  # 2.5 x 12 rollouts


def test_epochs_are_decimals() -> None:
    assert int(0.29 * 100) == 28
    assert batch_plan(numbers(1, 8, 1, 1, 8, num_train_epochs=0.29), 1, 100).total_steps == 29


def test_max_steps_wins() -> None:
    assert batch_plan(numbers(1, 8, 1, 1, 8, num_train_epochs=3, max_steps=5), 1, 100).total_steps == 5
    assert batch_plan(numbers(1, 8, 1, 1, 8, max_steps=5), 1).total_steps == 5


def test_equivalent_splits_are_the_same_run() -> None:
    plan = batch_plan(numbers(2, 4, 3, 6, 8), 2)
    assert plan.equivalent_splits() == ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1))
    for b, a in plan.equivalent_splits():
        other = batch_plan(numbers(2, b, a, 2 * a, 8), 2)
        assert other.completions_per_step == plan.completions_per_step
        assert other.completions_per_rollout == plan.completions_per_rollout
        assert other.steps_per_rollout == plan.steps_per_rollout


def test_words_and_dict() -> None:
    plan = batch_plan(numbers(2, 8, 4, 4, 8), 2, 1001)
    assert plan.in_words() == [
        "1 rollout = 8 prompts x 8 completions = 64 completions",
        "1 optimizer step = 2 processes x 8 completions x 4 forward passes = 64 completions = 8 prompts",
        "1 optimizer step per rollout: on-policy",
        "1 epoch = 1,001 prompts = 125 rollouts = 125 optimizer steps; 1 prompt left over",
        "the run = 125 optimizer steps",
    ]
    assert plan.as_dict()["total_steps"] == 125
    assert [8, 4] in plan.as_dict()["equivalent_splits"]
