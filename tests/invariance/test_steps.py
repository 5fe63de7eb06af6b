"""Rewards of steps: a run is the same replayed, resumed in the middle of a rollout, and on two processes.

Sampled runs with a reward in a worker, which pass every guard on the way, the gradient that is computed twice
(F127) among them. That the gradient of one step does not depend on how it is cut is in test_algorithms.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config.resolve import from_dict
from covey.errors import ConfigError, GuardStop
from covey.selftest.compare import far
from covey.telemetry.rollouts import read_rollouts
from covey.training.run import train
from support.exactness import GRADIENT, moved, norm
from support.runs import options, train_and_watch, train_in_processes

PRM = """
def prm(completion_steps):
    # Digits are good and letters are bad: steps of one completion differ, and so do completions.
    def score(s):
        return sum(c.isdigit() - 0.1 * c.isalpha() for c in s) / (1 + len(s))

    return [[score(step) for step in steps] for steps in completion_steps]


def mixed(completion_steps):
    return [[1.0] * len(t) if n % 2 else 0.5 for n, t in enumerate(completion_steps)]


def first(completion_steps):
    # As one number per completion, and as the one number of a completion's one step.
    return [[float(len(t[0]) % 7)] if t else [] for t in completion_steps]


def one(completions):
    return [float(len(c) % 7) for c in completions]
"""


def opts(output: Path, **changes: Any) -> dict[str, Any]:
    """A sampled run whose completions are cut at `>`, so that they have several steps."""
    reward = output.parent / "prm.py"
    reward.write_text(PRM)
    base = options(
        Path("quickstart"),
        output,
        max_steps=4,
        save_steps=2,
        learning_rate=1e-4,
        num_generations=8,
        per_device_train_batch_size=16,
        keep_trainer_state=2,
    )
    own = {"reward_funcs": [f"{reward}:prm", "accuracy"], "step_separator": ">", "reward_workers": 1}
    return {**base, "mask_truncated_completions": False, **own, **changes}


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("time/", "throughput/", "memory/", "policy_age")
    return [{k: v for k, v in line.items() if not k.startswith(times)} for line in lines]


def completions(run: Path) -> list[dict[str, Any]]:
    return [record for _, records in read_rollouts(run / "rollouts") for record in records]


def same_weights(one: Any, two: Any) -> bool:
    return all(torch.equal(one.after[name], two.after[name]) for name in one.after)


TWO_PASSES = {"num_iterations": 2, "beta": 0.05, "scale_rewards": "batch"}


@pytest.mark.parametrize("changes", [{}, TWO_PASSES], ids=["plain", "kl and two passes"])
def test_a_replay_is_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    sampled = train_and_watch(opts(tmp_path / "sampled", **changes))
    rollouts = str(tmp_path / "sampled" / "rollouts")
    again = train_and_watch(opts(tmp_path / "again", replay_rollouts=rollouts, **changes))
    assert records(tmp_path / "again") == records(tmp_path / "sampled")
    assert same_weights(again, sampled)
    assert norm(moved(sampled)) > 0
    # Steps end where their text does, and there are several of them.
    rows = completions(tmp_path / "sampled")
    steps = [part["steps"] for row in rows for part in row["parts"] if part["name"] == "prm"]
    assert sum(len(s) > 2 for s in steps) > len(steps) / 2
    assert all(row["steps"]["ends"][-1] == len(row["completion_ids"]) for row in rows if row["text"])
    # With the steps weighed otherwise it is another run.
    other = train_and_watch(
        opts(tmp_path / "other", replay_rollouts=rollouts, reward_weights=[0.1, 1.0], **changes)
    )
    assert not same_weights(other, sampled)


def test_a_resume_in_the_middle_of_a_rollout_is_the_same_run(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = train_and_watch(opts(whole, **TWO_PASSES))
    train_and_watch(opts(cut, stop_after_steps=3, **TWO_PASSES))
    state = json.loads((cut / "checkpoint-3/trainer/state.json").read_text())
    assert "token_advantages" in json.dumps(state)
    found = train_and_watch(opts(cut, resume_from_checkpoint="latest", **TWO_PASSES))
    assert records(cut) == records(whole)
    assert same_weights(found, expected)


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes_sample_and_learn_the_same(tmp_path: Path) -> None:
    one = train_and_watch(opts(tmp_path / "one", max_steps=2))
    (two,) = train_in_processes(
        [opts(tmp_path / "two", max_steps=2, per_device_train_batch_size=8)], tmp_path / "work"
    )
    ours, theirs = completions(tmp_path / "one"), completions(tmp_path / "two")
    for a, b in zip(ours, theirs, strict=True):
        assert (a["completion_ids"], a["parts"], a["steps"]) == (b["completion_ids"], b["parts"], b["steps"])
    assert far(two.gradients[0], one.gradients[0]) <= GRADIENT


def test_one_step_is_the_run_with_the_outcome_to_the_bit(tmp_path: Path) -> None:
    reward = f"{tmp_path / 'prm.py'}:"
    runs = [
        train_and_watch(
            opts(tmp_path / name, max_steps=2, reward_funcs=[reward + name], step_separator="\x07")
        )
        for name in ("first", "one")
    ]
    assert same_weights(*runs)
    first, one = records(tmp_path / "first"), records(tmp_path / "one")
    for ours, theirs in zip(first, one, strict=True):
        assert {k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k)} == {
            *(f"rewards/{name}/{of}" for name in ("first", "one") for of in ("mean", "std")),
            "n",
        }
    assert first[0]["grad_norm"] > 0


def test_what_a_trial_cannot_know_stops_at_the_first_rollout(tmp_path: Path) -> None:
    reward = f"{tmp_path / 'prm.py'}:"
    for changes, words in (
        ({"reward_funcs": [reward + "mixed"]}, "lists for"),
        ({"loss_type": "fipo"}, "returns one number per step, but loss_type is fipo"),
    ):
        with pytest.raises(GuardStop) as stop:
            train_and_watch(opts(tmp_path / f"run{len(words)}", reward_trial=False, **changes))
        assert stop.value.finding.code == "F129" and words in stop.value.finding.seen
        assert not list((tmp_path / f"run{len(words)}").glob("metrics.jsonl")) or not records(
            tmp_path / f"run{len(words)}"
        )


def test_what_a_trial_shows_is_refused_before_weights_load(tmp_path: Path) -> None:
    changes = {"loss_type": "vespo", "advantage_estimator": "rloo"}
    with pytest.raises(ConfigError) as refused:
        train(from_dict(opts(tmp_path / "run", **changes)))
    found = [(p.code, p.option) for p in refused.value.problems if p.severity == "error"]
    assert found == [("E353", "advantage_estimator"), ("E353", "loss_type")]
    assert not (tmp_path / "run").exists()
