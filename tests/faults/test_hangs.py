"""Two processes of which one is stuck, or about to do something else: the run ends by itself and names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import hung_run

WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#512", "--reward_funcs", "accuracy", "format"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "16", "--max_steps", "20"),
    *("--save_steps", "1", "--nproc_per_node", "2", "--output_dir", "run"),
]


def run(fault: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The command; it comes back when all that hold its pipes have ended, workers of rewards too."""
    return subprocess.run(
        [sys.executable, hung_run.__file__, fault, "train", *WORDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )


def findings(run: Path) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [e for e in events if e["kind"] == "finding" and e["code"] != "F108"]


@pytest.mark.multi
def test_a_rank_that_is_stuck_ends_the_run_and_is_named(tmp_path: Path) -> None:
    done = run("stuck", tmp_path)
    assert done.returncode == 3, done.stderr
    hang = tmp_path / "run" / "hang-0001"
    ranks = [json.loads((hang / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(r["phase"], r["step"]) for r in ranks] == [("update", 3)] * 2
    assert [r["collective"] for r in ranks] == ["gradients", ""]
    (event,) = findings(tmp_path / "run")
    assert event["code"] == "F301" and event["step"] == 3
    stacks = (hang / "rank-1.txt").read_text()
    assert "in sleep_forever" in stacks and "time.sleep(10_000)" in stacks
    assert "sleep_forever" not in (hang / "rank-0.txt").read_text()
    assert "Rank 1 is in update, micro-batch 1 of 1, after step 3, at hung_run.py" in str(event["seen"])
    assert "Rank 0 waits in gradients" in str(event["seen"])
    assert done.stderr.count("F301") == 1
    assert "--resume_from_checkpoint" in done.stderr and "run/checkpoint-3" in done.stderr
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank["pid"], 0)


@pytest.mark.multi
def test_ranks_about_to_do_different_things_are_told_apart(tmp_path: Path) -> None:
    """One has a micro-batch too many: nothing waits, and the step is not taken."""
    done = run("uneven", tmp_path)
    assert done.returncode == 3, done.stderr
    (event,) = findings(tmp_path / "run")
    assert event["code"] == "F302"
    assert "rank 0: update after step 3 with 1 micro-batch and" in str(event["seen"])
    assert "rank 1: update after step 3 with 2 micro-batches" in str(event["seen"])
    assert "F302" in done.stderr
    assert not list((tmp_path / "run").glob("hang-*"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
