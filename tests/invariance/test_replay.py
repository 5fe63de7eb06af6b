"""Rollout files are complete enough to train on again: replayed, they give the very run that wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.runs import options, train_and_watch

TIMES = ("time/", "throughput/", "memory/", "policy_age")


def opts(output: Path, **changes: Any) -> dict[str, Any]:
    base = options(
        Path("quickstart"),
        output,
        max_steps=4,
        learning_rate=1e-4,
        num_generations=8,
        per_device_train_batch_size=16,
    )
    return {**base, "mask_truncated_completions": False, "reward_funcs": ["accuracy", "format"], **changes}


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_iterations": 2, "beta": 0.05}, {"top_p": 0.7, "top_k": 40, "num_iterations": 2}],
    ids=["plain", "kl and two passes", "filters"],
)
def test_replay_is_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    sampled = train_and_watch(opts(tmp_path / "sampled", **changes))
    again = train_and_watch(
        opts(tmp_path / "again", replay_rollouts=str(tmp_path / "sampled" / "rollouts"), **changes)
    )
    assert metrics(tmp_path / "again") == metrics(tmp_path / "sampled")
    assert all(torch.equal(again.after[k], sampled.after[k]) for k in sampled.after)
    moved = sum(not torch.equal(sampled.before[k], sampled.after[k]) for k in sampled.after)
    assert moved == len(sampled.after)


def test_replay_weighs_rewards_anew(tmp_path: Path) -> None:
    train_and_watch(opts(tmp_path / "sampled"))
    rollouts = str(tmp_path / "sampled" / "rollouts")
    train_and_watch(opts(tmp_path / "again", replay_rollouts=rollouts, reward_weights=[2.0, 0.0]))
    first, again = metrics(tmp_path / "sampled")[0], metrics(tmp_path / "again")[0]
    assert again["reward"] == pytest.approx(2 * first["rewards/accuracy/mean"])
    assert again["reward"] != first["reward"]
