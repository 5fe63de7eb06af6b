"""The other side: runs of a hundred steps without a fault raise nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.api import train
from mutants.faults_turns import EXTENDED, MASKED, REWRITTEN
from mutants.harness import BASE
from support.runs import train_in_processes

LORA = {"tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-3}
NOISE = """
import random

def noisy(completions, **columns):
    return [random.random() for _ in completions]
"""

HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "one group a step": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "accumulation 8": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
    "two updates per rollout": {"steps_per_generation": 4},
    "two passes": {"num_iterations": 2},
    "two passes with KL": {"num_iterations": 2, "beta": 0.05},
    "KL": {"beta": 0.1},
    "bfloat16": {"torch_dtype": "bfloat16"},
    "bfloat16 with KL and two passes": {"torch_dtype": "bfloat16", "beta": 0.05, "num_iterations": 2},
    "LoRA": LORA,
    "LoRA in bfloat16": {**LORA, "torch_dtype": "bfloat16"},
    "LoRA with KL": {**LORA, "beta": 0.1},
    "moving reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 10},
    "moving reference of LoRA, bfloat16": {
        **LORA,
        "beta": 0.1,
        "torch_dtype": "bfloat16",
        "sync_ref_model": True,
        "ref_model_sync_steps": 7,
    },
    "batch scale": {"scale_rewards": "batch"},
    "no scale": {"scale_rewards": "none"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo, truncated rows masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "high temperature": {"temperature": 1.5},
    "low temperature": {"temperature": 0.5},
    "top-p 0.9": {"top_p": 0.9},
    "all filters, two passes with KL": {
        **{"min_p": 0.02, "top_k": 20, "top_p": 0.9},
        **{"num_iterations": 2, "beta": 0.05},
    },
    "warm-up and cosine": {"warmup_steps": 50, "lr_scheduler_type": "cosine"},
    "noisy reward": {"reward_funcs": ["noisy"]},
    "generate engine": {"engine": "generate"},
    **{
        f"{loss}, two passes": {"loss_type": loss, "num_iterations": 2}
        for loss in ("bnpo", "cispo", "sapo", "vespo", "real", "fipo")
    },
    "luspo, ratio of the sequence": {
        **{"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    },
    "GSPO": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "RLOO": {"advantage_estimator": "rloo"},
    "REINFORCE++ with one completion": {
        **{"advantage_estimator": "reinforce_plus_plus", "num_generations": 1, "beta": 0.05},
        "kl_in_reward": True,
    },
    "GDPO": {"scale_rewards": "gdpo"},
    "entropy bonus and mask": {"entropy_coef": 0.001, "top_entropy_quantile": 0.5},
    "sequence mask and correction": {
        **{"off_policy_sequence_mask_delta": 0.5, "rollout_importance_sampling_mode": "token_truncate"},
        "num_iterations": 2,
    },
    "three turns": EXTENDED,
    "three turns in LoRA, two passes with KL, top-p": {
        **{**EXTENDED, **LORA, "num_iterations": 2, "beta": 0.05, "top_p": 0.9},
    },
    "three turns, a sequence each": REWRITTEN,
    "three turns, a sequence each, two passes with KL": {**REWRITTEN, "num_iterations": 2, "beta": 0.05},
    "a scheduler that masks": MASKED,
    "three turns, any of which may be cut": {**EXTENDED, "max_completion_length": 40},
    "temperature that falls": {"temperature": 1.0, "temperature_end": 0.7, "temperature_schedule": "linear"},
}
# What a healthy run may say: a reward that never differs in the first rollout, and the model's layout.
SAID = {"F105", "F108"}


# The built-in model has learned one turn alone: in later ones it may repeat itself, be unsure of every token,
# or come to no end.
SAID_OF_TURNS = {"F205", "F206", "F219"}


def _findings(run: Path) -> list[str]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [e["code"] for e in map(json.loads, lines) if e["kind"] == "finding" and e["code"] not in SAID]


@pytest.mark.slow
@pytest.mark.parametrize("options", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_run_is_silent(options: Mapping[str, Any], tmp_path: Path) -> None:
    chosen = {**BASE, **options, "max_steps": 100, "save_steps": 500, "output_dir": str(tmp_path / "run")}
    if chosen["reward_funcs"] == ["noisy"]:
        (tmp_path / "noisy.py").write_text(NOISE)
        chosen["reward_funcs"] = [f"{tmp_path / 'noisy.py'}:noisy"]
    outcome = train(**chosen)
    assert (outcome.exit_code, outcome.step) == (0, 100)
    said = SAID_OF_TURNS if "environment_factory" in options else set()
    assert {*_findings(tmp_path / "run")} <= said


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "LoRA"])
def test_two_healthy_ranks_are_silent(options: Mapping[str, Any], tmp_path: Path) -> None:
    chosen = {**BASE, **options, "max_steps": 100, "save_steps": 500, "output_dir": str(tmp_path / "run")}
    train_in_processes([chosen], tmp_path / "work")
    assert _findings(tmp_path / "run") == []
