"""What a launcher's trial of the rewards has found reaches the ranks of its run, and no other one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.checks.rewards.handed import TRIAL, handed, taken
from covey.plan.facts.rewards import RewardFacts, RewardModelFacts
from covey.types import BlindReward
from journeys.helpers import flags, rows, small, succeed, write_jsonl
from support.checks import config

BLIND = BlindReward(
    reward="a", column="solution", compared="others", num_rows=6, num_told_apart=1, constant=0.5
)
PASSED = RewardFacts(
    texts=(("r.py:f", "12"),),
    blind=(BLIND,),
    process=("steps",),
    reads_steps=True,
    names=("f",),
    notes=("n",),
)
KNOWN = RewardFacts(texts=PASSED.texts, names=PASSED.names, notes=PASSED.notes)


def test_a_rank_knows_what_was_found() -> None:
    assert taken(config(), KNOWN, handed(config(), PASSED)) == PASSED


@pytest.mark.parametrize(
    "changes, known",
    [
        ({"reward_weights": [2.0]}, KNOWN),
        ({"seed": 7}, KNOWN),
        ({}, RewardFacts(texts=(("r.py:f", "13"),))),
    ],
)
def test_another_run_tries_its_own(changes: dict[str, Any], known: RewardFacts) -> None:
    assert taken(config(**changes), known, handed(config(), PASSED)) is None


def test_without_a_launcher_or_a_trial_nothing_is_known() -> None:
    assert handed(config(reward_trial=False), PASSED) == {}
    absent = RewardModelFacts(entry="org/model", name="model", is_here=False)
    assert handed(config(), replace(PASSED, models=(absent,))) == {}
    assert taken(config(), KNOWN, {}) is None
    assert TRIAL in handed(config(), PASSED)


@pytest.mark.multi
def test_rewards_are_tried_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes call a reward for as many completions as one does, which does not ask twice."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", rows(20))
    Path("r.py").write_text(
        "import os\n\n"
        "def noting(completions, **_):\n"
        "    with open('calls', 'a') as file:\n"
        "        file.write(f'{os.getppid()} {len(completions)}\\n')\n"
        "    return [len(text) / 16 for text in completions]\n"
    )
    one, two = (run(f"run{n}", n) for n in (1, 2))
    assert sum(one) == sum(two) > 16


def run(output: str, processes: int) -> list[int]:
    """The numbers of completions of each call."""
    Path("calls").unlink(missing_ok=True)
    given = small("train.jsonl", output, reward_funcs=["r.py:noting"], nproc_per_node=processes)
    succeed("train", *flags({**given, "per_device_train_batch_size": 8 // processes}))
    return [int(line.split()[1]) for line in Path("calls").read_text().splitlines()]
