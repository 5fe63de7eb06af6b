"""Whole runs with every loss, estimator, mask and correction: they go through and say what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import save_model
from support.runs import options, train_and_watch, write_rollouts

TWO = {"num_iterations": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("replay"), rollouts=2)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loss_type": "cispo"}, ("cispo_clip_ratio",)),
        ({"loss_type": "sapo"}, ()),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, ("clip_ratio/region_mean",)),
        ({"loss_type": "vespo"}, ("vespo/phi_seq_mean",)),
        ({"loss_type": "fipo"}, ("fipo/future_kl_mean", "fipo/influence_weight_mean")),
        ({"loss_type": "real"}, ()),
        ({"advantage_estimator": "rloo"}, ()),
        ({"advantage_estimator": "reinforce_plus_plus"}, ()),
        ({"beta": 0.05, "kl_in_reward": True, "advantage_estimator": "rloo"}, ("kl",)),
        ({"beta": 0.0, "beta_end": 0.1, "kl_in_reward": True}, ("kl", "beta")),
        ({"entropy_coef": 0.01, "top_entropy_quantile": 0.3}, ("entropy",)),
        ({"off_policy_sequence_mask_delta": 0.5}, ("off_policy_mask/masked_frac",)),
        (
            {"rollout_importance_sampling_mode": "token_truncate"},
            ("rollout_correction/ess", "rollout_correction/chi2", "rollout_correction/clipped_frac"),
        ),
    ],
    ids=str,
)
def test_goes_through_and_moves_the_weights(
    changes: dict[str, Any], names: tuple[str, ...], model: Path, replay: Path, tmp_path: Path
) -> None:
    result = train_and_watch(options(model, tmp_path / "run", replay, **TWO, **changes))
    assert len(result.metrics) == 4
    for line in result.metrics:
        assert {*names} <= line.keys()
        assert line["grad_norm"] > 0
    moved = sum(not torch.equal(result.before[name], after) for name, after in result.after.items())
    assert moved == len(result.after)


def test_rewards_kept_apart(tmp_path: Path) -> None:
    base = options(Path("quickstart"), tmp_path / "run", max_steps=2, num_generations=4, scale_rewards="gdpo")
    result = train_and_watch(
        {**base, "reward_funcs": ["accuracy", "format"], "mask_truncated_completions": False}
    )
    assert len(result.metrics) == 2
    assert result.metrics[0]["grad_norm"] > 0


def test_one_completion_a_prompt(tmp_path: Path) -> None:
    changes = {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus", "max_steps": 2}
    base = options(Path("quickstart"), tmp_path / "run", **changes)
    result = train_and_watch(
        {**base, "reward_funcs": ["accuracy", "format"], "mask_truncated_completions": False}
    )
    assert len(result.metrics) == 2


def rewritten(replay: Path, target: Path, rewards: dict[tuple[int, int], float]) -> Path:
    """The rollouts with other rewards, 0 where none is given."""
    target.mkdir()
    for file in sorted(replay.iterdir()):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["reward"] is not None:
                line["reward"] = rewards.get((line["group"], line["sibling"]), 0.0)
                line["parts"][0]["value"] = line["reward"]
        (target / file.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # The only good completion was cut, and leaves the loss: nothing is left to tell apart.
        {"loss_type": "real"},
        # What sampled the replayed tokens is nothing like this model: every completion is masked.
        {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": 0.5},
        {"rollout_importance_sampling_mode": "sequence_mask", "rollout_importance_sampling_threshold": 1e-6},
    ],
    ids=str,
)
def test_a_step_that_masks_leave_nothing_of_is_no_fault(
    changes: dict[str, Any], model: Path, replay: Path, tmp_path: Path
) -> None:
    given = rewritten(replay, tmp_path / "replay", {(1, 2): 1.0})
    result = train_and_watch(options(model, tmp_path / "run", given, max_steps=2, **changes))
    # Without these options there is something to learn.
    assert [line["grad_norm"] != 0.0 for line in result.metrics] == [not changes] * 2


def test_temperature_falls_over_the_run(tmp_path: Path) -> None:
    base = options(Path("quickstart"), tmp_path / "run", max_steps=3, temperature=1.2, temperature_end=0.4)
    result = train_and_watch({**base, "mask_truncated_completions": False})
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    drawn = [json.loads(file.read_text().splitlines()[0])["temperature"] for file in files]
    assert drawn == pytest.approx([1.2, 0.8, 0.4])
    assert [line["temperature"] for line in result.metrics] == pytest.approx([1.2, 0.8, 0.4])
