"""Sampled runs: another split draws the same completions, and learning reaches the weights however it is
cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.telemetry.rollouts import read_rollouts
from support.runs import options, train_and_watch, train_in_processes

SPLITS = ((16, 2), (4, 8), (1, 32))


def completions(run: Path) -> list[list[int]]:
    """Completion ids of every rollout in order."""
    found = [r["completion_ids"] for _, records in read_rollouts(run / "rollouts") for r in records]
    assert found
    return found


def flips(a: list[list[int]], b: list[list[int]]) -> int:
    """How many completions differ in at least one token."""
    assert len(a) == len(b)
    return sum(x != y for x, y in zip(a, b, strict=True))


def sampled(output: Path, **changes: Any) -> dict[str, Any]:
    """Options of three sampled steps of 32 completions on the built-in task."""
    opts = options(Path("quickstart"), output, max_steps=3, learning_rate=1e-4, num_generations=8)
    return {**opts, "mask_truncated_completions": False, "reward_funcs": ["accuracy", "format"], **changes}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    train_and_watch(sampled(output, per_device_train_batch_size=32))
    return output


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_another_split_draws_the_same(split: tuple[int, int], whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    batch, accumulation = split
    train_and_watch(
        sampled(output, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    )
    assert flips(completions(output), completions(whole)) == 0


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_draw_the_same(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train_in_processes([sampled(output, per_device_train_batch_size=16)], tmp_path / "work")
    assert flips(completions(output), completions(whole)) == 0


def test_flips_are_counted(whole: Path) -> None:
    found = completions(whole)
    spoiled = [[*found[0][:-1], 0], *found[1:]]
    assert flips(spoiled, found) == 1


def test_both_engines_draw_the_same(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train_and_watch(sampled(output, per_device_train_batch_size=32, engine="generate"))
    assert flips(completions(output), completions(whole)) == 0


def test_batch_1_accumulation_32_learns(tmp_path: Path) -> None:
    """The case that fails silently elsewhere: weights move at once, and KL is above 0 from the second
    step."""
    result = train_and_watch(
        sampled(
            tmp_path / "run",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=32,
            beta=0.04,
            learning_rate=1e-5,
        )
    )
    for step in result.metrics:
        assert step["grad_norm"] > 0
        assert step["frac_params_changed"] > 0.5
    assert result.metrics[0]["kl"] == 0.0
    assert all(step["kl"] > 0 for step in result.metrics[1:])


def test_ratio_is_one_before_an_update(tmp_path: Path) -> None:
    """With two passes a rollout, the first one's ratio is exactly 1: nothing is clipped and the loss is that
    of ratio 1; the second one's is not."""
    result = train_and_watch(
        sampled(tmp_path / "run", per_device_train_batch_size=32, num_iterations=2, epsilon=1e-6, max_steps=4)
    )
    first, second = result.metrics[0], result.metrics[1]
    assert (first["pass"], second["pass"]) == (0, 1)
    assert first["clip_ratio/region_mean"] == 0.0
    assert second["clip_ratio/region_mean"] > 0.0
