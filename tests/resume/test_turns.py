"""Runs of episodes of several turns are stopped, in the middle of a turn too, and go on with the same
completions, weights and moments, bit for bit.

Which turns decode side by side depends on when answers come, and the last bits of a logprob on what decodes
beside it. So what is measured of the sampler's logprobs alone may differ by rounding; nothing is learnt from
them here.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config.resolve import from_dict
from covey.rollout.native.engine import NativeEngine
from covey.rollout.turns import TurnLoop
from covey.telemetry.rollouts import read_rollouts
from covey.training.run import train
from resume.test_resume import records, run_whole_and_cut, tensors
from support.runs import options, train_and_watch
from support.sums import sums_file, thinking_template

OF_THE_SAMPLER = ("sampling/", "entropy_sampled")


def assert_same_run(actual: Path, expected: Path, step: int) -> None:
    """Equal records but for the sampler's, the same tokens, and checkpoints that are equal to the bit."""
    ours, theirs = records(actual), records(expected)
    assert len(ours) == len(theirs) > 0
    for own, other in zip(ours, theirs, strict=True):
        differ = [k for k in {*own, *other} if own.get(k) != other.get(k)]
        assert [k for k in differ if not k.startswith(OF_THE_SAMPLER)] == []
        assert all(own[k] == pytest.approx(other[k], abs=2e-4) for k in differ)
    saved, due = (tensors(run / f"checkpoint-{step}") for run in (actual, expected))
    # What a buffer holds of the sampler's logprobs is none of the model's.
    names = [name for name in due if "trainer/optimizer" in name or not name.startswith("trainer/")]
    assert len(names) > 100 and saved.keys() == due.keys()
    assert [name for name in names if not torch.equal(saved[name], due[name])] == []
    assert completions(actual) == completions(expected)


def completions(run: Path) -> list[Any]:
    """What was sampled and answered, and how it was scored."""
    found = []
    for record in (r for _, rows in read_rollouts(run / "rollouts") for r in rows):
        turns = [{k: v for k, v in turn.items() if k != "seconds"} for turn in record["turns"]]
        tokens = [(own["prompt_ids"], own["completion_ids"]) for own in record.get("sequences") or ()]
        found.append((record["prompt_ids"], record["completion_ids"], tokens, turns, record["parts"]))
    return found


def opts(output: Path, **changes: Any) -> dict[str, Any]:
    """A run of six steps of 4 prompts x 4 episodes of three turns, most of them of several sequences."""
    output.parent.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {
        "environment_factory": sums_file(output.parent),
        "chat_template": thinking_template(output.parent),
        "reward_funcs": [],
        "max_completion_length": 96,
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "mask_truncated_completions": False,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 1e-4,
        "keep_trainer_state": 2,
    }
    return options(Path("quickstart"), output, **{**own, **changes})


CASES: dict[str, dict[str, Any]] = {
    "end of a rollout": {},
    "middle of two passes": {"num_iterations": 2, "beta": 0.05},
    # Three rollouts of two steps each, one of which has been taken.
    "middle of two steps": {"steps_per_generation": 2, "per_device_train_batch_size": 8, "beta": 0.05},
    "groups without signal replaced": {
        "dynamic_sample": True,
        "max_resample_times": 1,
        "num_iterations": 2,
        "top_p": 0.8,
    },
}


SLOW = ("end of a rollout", "middle of two passes")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_one_process(case: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_and_watch(opts(whole, **CASES[case]))
    train_and_watch(opts(cut, stop_after_steps=3, **CASES[case]))
    assert len(records(cut)) == 3
    train_and_watch(opts(cut, resume_from_checkpoint="latest", **CASES[case]))
    assert_same_run(cut, whole, 6)


# Where a signal comes: before which call of what.
WITHIN = {
    "decoding": (NativeEngine, "_advance"),
    "a turn ends": (TurnLoop, "_take_turn"),
    "an answer comes": (TurnLoop, "_take_step"),
}


# How many calls there are depends on when answers come.
@pytest.mark.parametrize(
    ("case", "share"),
    [
        *(("decoding", 0.0), ("decoding", 0.4), ("a turn ends", 0.4), ("an answer comes", 0.8)),
        pytest.param("decoding", 0.8, marks=pytest.mark.slow),
        pytest.param("a turn ends", 0.8, marks=pytest.mark.slow),
        pytest.param("an answer comes", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_within_a_turn(
    case: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout is left at once, with its environments, and is sampled again: the run is the same."""
    whole, cut = run_whole_and_cut(WITHIN[case], share, opts, tmp_path, monkeypatch)
    assert_same_run(cut, whole, 4)


def test_a_signal_while_slow_answers_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an environment takes is not waited for."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(from_dict(opts(whole, max_steps=2), 1))
    monkeypatch.setenv("COVEY_TEST_SLOW_S", "30")
    real, has_begun = TurnLoop._between_steps, []

    def begins(self: Any) -> None:
        # All turns that are asked for have been sampled, and nothing has come back.
        if not has_begun and not self._asked and self._num_awaited == 16:
            has_begun.append(True)
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        real(self)

    monkeypatch.setattr(TurnLoop, "_between_steps", begins)
    stopped = train(from_dict(opts(cut, max_steps=2, reward_trial=False), 1))
    assert stopped.exit_code == 143 and stopped.step == 0 and has_begun
    monkeypatch.setenv("COVEY_TEST_SLOW_S", "0")
    train(from_dict(opts(cut, max_steps=2, resume_from_checkpoint="latest"), 1))
    assert_same_run(cut, whole, 2)
