"""A run that samples ahead, stopped in the middle of a rollout whose tokens several versions sampled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.test_ranks import REWARD
from journeys.helpers import assert_same_run, flags, rollouts, succeed
from support.servers import Running, slow_server, token_file


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with slow_server(rest_s=0.1) as found:
        yield found


@pytest.mark.parametrize(
    "more",
    [
        {"steps_per_generation": 2},
        {"steps_per_generation": 2, "beta": 0.05, "use_decoupled_loss": True}
        | {"rollout_importance_sampling_mode": "token_truncate"},
        {"num_iterations": 2},
    ],
    ids=["two steps", "decoupled", "two passes"],
)
def test_it_goes_on_in_the_middle_of_a_rollout(more: dict[str, Any], slow: Running, tmp_path: Path) -> None:
    """To the same bits: rows keep who sampled each of their tokens."""
    run, again = tmp_path / "run", tmp_path / "again"
    (tmp_path / "mine.py").write_text(REWARD)
    options: dict[str, Any] = {
        "model": "quickstart",
        "dataset": "quickstart#64",
        "reward_funcs": f"{tmp_path / 'mine.py'}:judge",
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 64,
        "temperature": 2.0,
        "learning_rate": 1e-3,
        "max_staleness": 1,
        "max_steps": 4,
        "save_steps": 1,
        "keep_trainer_state": 4,
        "reward_trial": False,
        "rollout_servers": slow.address,
        "rollout_token_file": str(token_file(tmp_path)),
        **more,
    }
    succeed("train", *flags({**options, "output_dir": run}))
    second = rollouts(run)[1]
    assert min(v for r in second for v in r["versions"]) == 0
    if "steps_per_generation" in more:
        assert any(len(set(r["versions"])) > 1 for r in second), "no swap in the middle"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoint-4")
    succeed("train", *flags({**options, "output_dir": again, "resume_from_checkpoint": "latest"}))
    assert_same_run(again, run, 4)
