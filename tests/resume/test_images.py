"""Runs on images are stopped in the middle of a rollout and go on with the same images, bit for bit.

Images of the rows that are trained on, and of the groups that are held for later rollouts, lie in files, or
in rows of the data, of a stream too. They are found there again, whatever rank forwards a row. Those that an
environment gave lie in the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.checkpoint.read import read_states
from covey.selftest.compare import far
from resume.test_resume import assert_same_run, records
from resume.test_turns import assert_same_run as assert_same_turns
from support.image_runs import image_data, image_options, looking
from support.runs import train_and_watch, train_in_processes

MIDDLE = {"num_iterations": 2}
HELD = {
    **MIDDLE,
    "reward_name": "half",
    "dynamic_sample": True,
    "max_resample_times": 1,
    "replay_buffer_size": 3,
}
KINDS = {"path", "row", "data"}
CASES = {
    "a rollout": MIDDLE,
    "a stream": {**MIDDLE, "streaming": True},
    "groups": HELD,
    "an environment": MIDDLE,
}
FAMILIES = "qwen2_5_vl", "gemma3", "smolvlm"


@pytest.fixture(scope="module")
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_data(tmp_path_factory.mktemp(request.param), request.param)


def opts(data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Six steps, two of each rollout, saved in the middle of the second rollout."""
    saved = {"max_steps": 6, "save_steps": 3, "keep_trainer_state": 2}
    return image_options(data / "model", data / "rows.jsonl", output, **{**saved, **changes})


def kinds(checkpoint: Path) -> dict[str, set[str]]:
    """Where the images are of the rows that a checkpoint holds, and of its groups."""
    states: dict[str, Any] = {name: state.json for name, state in read_states(checkpoint).items()}
    held = [record for _, group in states.get("selection", {}).get("held", ()) for record in group]
    return {
        name: {kind for row in found for one in row.get("media", ()) for kind in one.keys() & KINDS}
        for name, found in (("rows", states["rollout"]["rows"]), ("groups", held))
    }


@pytest.mark.parametrize(
    ("data", "case"),
    # The last two are in the middle of a rollout too.
    [
        (f, case)
        for f in FAMILIES
        for case in CASES
        if f == FAMILIES[0] or case in ("groups", "an environment")
    ],
    indirect=["data"],
)
def test_one_process(case: str, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = {**CASES[case], **(looking(tmp_path) if case == "an environment" else {})}
    train_and_watch(opts(data, whole, **changes))
    train_and_watch(opts(data, cut, stop_after_steps=3, **changes))
    found = kinds(cut / "checkpoint-3")
    assert "row" in found["rows"] and bool(found["groups"]) == (case == "groups")
    assert ("data" in found["rows"]) == (case == "an environment")
    train_and_watch(opts(data, cut, resume_from_checkpoint="latest", **changes))
    if case == "an environment":
        assert_same_turns(cut, whole, 6)
    else:
        assert_same_run(cut, whole, 6)
    gaps = [record["sampling/logprob_max_gap"] for record in records(whole)]
    assert len(gaps) == 6 and max(gaps) < 1e-5, "sampler and learner see the same"


def num_moved(run: Path) -> int:
    """How many rows with images another rank forwards than the one that sampled them, in the middle of the
    second rollout."""
    states: dict[str, Any] = {name: state.json for name, state in read_states(run / "checkpoint-3").items()}
    found = 0
    for rank in (0, 1):
        lines = (run / f"rollouts/rollout-000001.{rank}-of-2.jsonl").read_text().splitlines()
        own = {(record["group"], record["sibling"]) for record in map(json.loads, lines)}
        found += sum(
            (row["group"], row["sibling"]) in own and row["rank"] != rank and bool(row.get("media"))
            for row in states["rollout"]["rows"]
        )
    return found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("data", FAMILIES, indirect=True)
def test_two_processes(data: Path, tmp_path: Path) -> None:
    """To the bit on as many ranks; one process goes on with what two have saved. Only one group of a rollout
    has signal, so some of its rows move."""
    whole, cut, alone = tmp_path / "whole", tmp_path / "cut", tmp_path / "alone"
    of_one = {**MIDDLE, "reward_name": "half", "beta": 0.0}
    changes = {**of_one, "per_device_train_batch_size": 4}
    cut_at = {"stop_after_steps": 3}
    two, *_ = train_in_processes(
        [opts(data, whole, **changes), *(opts(data, path, **cut_at, **changes) for path in (cut, alone))],
        tmp_path / "first",
    )
    assert num_moved(cut) > 0
    again = {"resume_from_checkpoint": "latest"}
    train_in_processes([opts(data, cut, **again, **changes)], tmp_path / "second")
    assert_same_run(cut, whole, 6)
    one = train_and_watch(opts(data, alone, **again, **of_one))
    assert far(one.after, two.after) < 1e-6
    assert len(records(alone)) == 6
