"""Episodes that are lost to infrastructure failures: a few are left out, many stop the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.errors import GuardStop
from covey.health.guards.outcomes import check_outcomes, refuse_lost
from covey.telemetry.line import format_line
from covey.training.measure import length_metrics, outcome_metrics
from covey.types import Finish, Metric, Outcome, Score, ScoredGroup, StepRecord
from support.groups import episode, scored


def rollout(num: int, *failures: str) -> list[ScoredGroup]:
    """Groups of four, whose first episodes were lost by these failures."""
    episodes = [episode(sibling=i % 4, number=i // 4) for i in range(num)]
    lost = [
        replace(e, outcome=Outcome.INFRASTRUCTURE, sequences=(), failure=why)
        for e, why in zip(episodes, failures, strict=False)
    ]
    episodes[: len(lost)] = lost
    scores = [Score(total=1.0, parts=())] * 4
    asked = [episodes[i : i + 4] for i in range(0, num, 4)]
    whole = scored([episode()] * 4, scores)
    return [replace(whole, group=replace(whole.group, episodes=tuple(members))) for members in asked]


@pytest.mark.parametrize(("num", "lost"), [(64, 0), (64, 3), (8, 1), (40, 2)])
def test_a_few_lost_episodes_stop_nothing(num: int, lost: int) -> None:
    check_outcomes(rollout(num, *["sandbox: timeout"] * lost), 3)


@pytest.mark.parametrize(("num", "lost"), [(64, 4), (8, 2), (39 + 1, 3)])
def test_many_lost_episodes_stop_the_run_with_their_causes(num: int, lost: int) -> None:
    failures = ["sandbox: timeout"] * (lost - 1) + ["http://one:8000: refused"]
    with pytest.raises(GuardStop) as stopped:
        check_outcomes(rollout(num, *failures), 3)
    found = stopped.value.finding
    assert (found.code, found.step) == ("F138", 3)
    assert f"{lost} of {num}" in found.seen
    assert "sandbox: timeout" in found.seen and "http://one:8000: refused" in found.seen


def test_an_evaluation_needs_all_of_its_episodes() -> None:
    refuse_lost(rollout(64), 3)
    with pytest.raises(GuardStop) as stopped:
        refuse_lost(rollout(64, "http://one:8000: refused"), 3)
    found = stopped.value.finding
    assert (found.code, found.step) == ("F138", 3)
    assert "1 of 64" in found.seen and "http://one:8000: refused" in found.seen


def test_what_became_of_episodes_is_counted_and_failures_are_in_the_line() -> None:
    members = [e for g in rollout(4, "x", "x") for e in g.group.episodes]
    metrics = outcome_metrics([*members, episode(finish=Finish.LENGTH)])
    assert metrics["outcome/infrastructure"] == Metric(value=2, count=5)
    assert metrics["outcome/scored"] == Metric(value=2, count=5)
    assert metrics["outcome/truncated"] == Metric(value=1, count=5)

    def line(**values: Metric) -> str:
        record = StepRecord(step=1, rollout=0, pass_index=0, metrics=values)
        return format_line(record, 2, elapsed="0:01", left="0:01", width=None)

    assert line(**metrics).endswith("lost 2")
    whole = outcome_metrics([e for g in rollout(4) for e in g.group.episodes])
    assert "lost" not in line(**whole) and "abort" not in line(**whole)


def test_lost_episodes_have_no_length() -> None:
    members = [e for g in rollout(4, "x") for e in g.group.episodes]
    whole = [e for g in rollout(3 + 1) for e in g.group.episodes][1:]
    assert length_metrics(members) == length_metrics(whole)
    assert length_metrics(members)["completions/min_length"].count == 3
    nothing = length_metrics([e for g in rollout(4, *"xxxx") for e in g.group.episodes])
    assert {m.value for m in nothing.values()} == {None}
