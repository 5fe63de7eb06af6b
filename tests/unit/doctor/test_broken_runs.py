"""Recorded runs of the built-in model: what broke in the first steps is named first, what is well is not.

`logs/runs.jsonl` has a run a line, with the metrics of each step: 1e-2 to 1e-3 as the learning rate, rewards
for length, for short answers or for some number beside accuracy, and healthy runs, some of few completions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.doctor.examine import Report, examine
from covey.doctor.log import Log
from covey.types import Metric, StepRecord

RUNS = [json.loads(x) for x in (Path(__file__).parent / "logs" / "runs.jsonl").read_text().splitlines()]
NAMES = [run["run"] for run in RUNS]
BAD = [run for run in RUNS if run["verdict"] not in ("learning", "healthy")]
WELL = [run for run in RUNS if run["verdict"] in ("learning", "healthy")]


def report(run: dict[str, Any], steps: int | None = None, *, source: str = "covey") -> Report:
    """The doctor's report on a run, or on its first steps."""
    columns, counts, per_rollout = run["columns"], run["n"], run["steps_per_rollout"]
    records = []
    for i in range(len(columns["reward"]))[:steps]:
        metrics = {n: Metric(value=v[i], count=counts[n]) for n, v in columns.items()}
        if source != "covey":
            # Other logs do not say how many things a value saw, nor what completions are like.
            metrics = {n: Metric(value=m.value, count=1) for n, m in metrics.items() if n not in _OURS}
        records.append(StepRecord(step=i + 1, rollout=i // per_rollout, pass_index=0, metrics=metrics))
    events = [{"kind": "evaluated", "step": 0, **run["before"]}] if run["before"] else []
    log = Log(
        source=source,
        path=Path("run"),
        records=records,
        total_steps=len(records),
        options=run["options"] if source == "covey" else {},
        events=events,
    )
    return examine(log, 1e10)


_OURS = (
    "completions/repetitive_ratio",
    "completions/identical_groups",
    "completions/unparsed_ratio",
    "completions/most_common_ratio",
    "completions/reward_length_correlation",
    "entropy_sampled",
)


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_the_first_verdict(run: dict[str, Any]) -> None:
    assert report(run).verdict == run["verdict"]


@pytest.mark.parametrize("run", BAD, ids=[r["run"] for r in BAD])
def test_a_lack_of_signal_is_never_named_before_what_caused_it(run: dict[str, Any]) -> None:
    """At twenty steps or less, too: with no verdict yet, or with the right kind of one."""
    if run["run"] == "a constant reward":
        return
    for steps in (7, 10, 15, 20, 30, 40):
        found = report(run, steps)
        assert found.verdict in (
            "healthy",
            "unclear",
            "unhealthy",
            "broken",
            "reward hacking",
            "collapsed",
            "getting worse",
        )
        holds = [s.finding.code for s in found.sightings if s.holds]
        assert holds[:1] != ["F211"]


@pytest.mark.parametrize("run", WELL, ids=[r["run"] for r in WELL])
def test_a_healthy_run_is_left_alone_at_every_length(run: dict[str, Any]) -> None:
    for steps in range(2, len(run["columns"]["reward"]) + 1, 3):
        found = report(run, steps)
        assert found.exit_code == 0, (steps, found.summary)


@pytest.mark.parametrize("run", WELL, ids=[r["run"] for r in WELL])
def test_nor_in_a_log_that_says_less(run: dict[str, Any]) -> None:
    """As TRL writes it: no counts, no options, no word about the completions."""
    assert report(run, source="TRL").exit_code == 0


@pytest.mark.parametrize("run", BAD, ids=[r["run"] for r in BAD])
def test_a_log_that_says_less_is_not_called_well(run: dict[str, Any]) -> None:
    """One step is the only one before the graded reward breaks: without counts that is no evidence."""
    if run["run"] == "a graded reward at 3e-3":
        return
    found = report(run, source="TRL")
    assert found.exit_code == 3
    if run["run"] != "a constant reward":
        assert [s.finding.code for s in found.sightings if s.holds][:1] != ["F211"]


def test_the_evaluation_before_the_first_step_counts() -> None:
    """Held-out 0.39 before the first step and 0.004 at the end, while the log of training says nothing."""
    run = next(r for r in RUNS if r["before"])
    level = [0.2] * len(run["columns"]["reward"])
    columns = {"eval_reward": run["columns"]["eval_reward"], "reward": level}
    quiet = {**run, "columns": columns, "n": {**run["n"], "eval_reward": 256}}
    assert [s.finding.code for s in report(quiet).sightings] == ["F222"]
    assert report({**quiet, "before": {}}).exit_code == 0
