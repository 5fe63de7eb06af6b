"""Short runs of every loss, baseline, scale and divergence on eight additions: what is held equal, what
differs, and whether the reward rises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.api import train

STEPS, WINDOW = 40, 10
BOUND = 0.12
"""The least rise of the share of right answers: four times its noise. A mean over ten steps is one of 320
completions, so that the difference of two has a standard deviation of 0.03 where nothing is learnt."""

EQUAL: Mapping[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#8"],
    "reward_funcs": ["accuracy", "format"],
    "loss_type": "dapo",
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    # The second update on a rollout is off-policy; with one alone most losses would have the same gradient.
    "num_iterations": 2,
    "max_completion_length": 24,
    "learning_rate": 2e-4,
    "torch_dtype": "float32",
    "seed": 42,
    "max_steps": STEPS,
    "save_steps": 1000,
    "save_only_model": True,
    "rollout_log": "none",
}

KL: Mapping[str, Any] = {"beta": 0.05}
CURVES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "loss_type": {
        **{name: {"loss_type": name} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo")},
        "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        **{name: {"loss_type": name} for name in ("vespo", "real", "fipo")},
    },
    "importance_sampling_level": {
        # The clipping distances of GSPO, of which those of a token are a thousandfold.
        name: {
            "loss_type": "grpo",
            "importance_sampling_level": name,
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        }
        for name in ("sequence", "sequence_token")
    },
    "advantage_estimator": {
        "rloo": {"advantage_estimator": "rloo"},
        "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
        # One completion of 64 prompts, in place of eight of 8.
        "reinforce_plus_plus, num_generations 1": {
            "advantage_estimator": "reinforce_plus_plus",
            "num_generations": 1,
            "dataset": ["quickstart#64"],
        },
    },
    "scale_rewards": {name: {"scale_rewards": name} for name in ("batch", "none", "gdpo")},
    "KL divergence": {
        **{name: {**KL, "kl_estimator": name} for name in ("k3", "k2", "k1")},
        "kl_in_reward": {**KL, "kl_in_reward": True},
        "sync_ref_model": {**KL, "sync_ref_model": True, "ref_model_sync_steps": 10},
    },
}
CONTROL: Mapping[str, Any] = {"learning_rate": 0.0}
"""The run that must not rise."""


def course(options: Mapping[str, Any], output: Path) -> list[float]:
    """The share of right answers at every step of a run."""
    train(**{**EQUAL, **options, "output_dir": str(output)})
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["rewards/accuracy/mean"] for line in lines]


def start(values: Sequence[float]) -> float:
    """The mean of the first ten steps."""
    return sum(values[:WINDOW]) / WINDOW


def end(values: Sequence[float]) -> float:
    """The mean of the last ten steps."""
    return sum(values[-WINDOW:]) / WINDOW


def first_above(values: Sequence[float], level: float) -> int | None:
    """The first step with which the mean of ten steps is above a level."""
    means = (sum(values[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(values) + 1))
    return next((i for i, mean in enumerate(means, start=WINDOW) if mean > level), None)
