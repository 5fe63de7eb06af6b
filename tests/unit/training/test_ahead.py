"""What is said of ages and of who waited, by hand-worked values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.comm import LocalComm
from covey.health.history import History
from covey.texts.language import spoken
from covey.training.ahead import LEARNER_WAITS, SAMPLER_WAITS, age_metrics, waits
from covey.types import Metric, Score, StepRecord
from support.groups import episode, scored


def test_ages_count_in_rollouts() -> None:
    """Two steps a rollout, version 8: 6 tokens of now, 2 half a rollout old, 4 of two rollouts."""
    episodes = []
    for sibling, versions in enumerate([((8, 3),), ((4, 4), (7, 2), (8, 3))]):
        made = episode((5, 6), tuple(range(10, 10 + sum(n for _, n in versions))), sibling=sibling)
        (row,) = made.sequences
        episodes.append(replace(made, sequences=(replace(row, versions=versions),)))
    group = scored(episodes, [Score(total=0.0, parts=())] * 2)
    found = age_metrics([group], 8, 2, 3, LocalComm())
    assert {name: metric.value for name, metric in found.items()} == {
        "age/mean": pytest.approx((2 * 0.5 + 4 * 2.0) / 12),
        "age/max": 2.0,
        "age/share_0": pytest.approx(6 / 12),
        "age/share_1": pytest.approx(2 / 12),
        "age/share_2": pytest.approx(4 / 12),
        "age/share_3": 0.0,
    }
    assert {metric.count for metric in found.values()} == {12}


@pytest.mark.parametrize(
    ("learner", "sampler", "most", "servers", "advice"),
    [
        (0.6, 0.0, 1, 1, "more servers"),
        (0.6, 0.5, 1, 1, "--max_staleness 2"),
        (0.0, 0.6, 3, 1, "--max_staleness 2"),
        (0.0, 0.6, 1, 2, "fewer servers"),
        (0.0, 0.6, 1, 1, ""),
        (0.1, 0.1, 1, 1, ""),
    ],
)
def test_who_waited_is_said_with_what_would_change_it(
    learner: float, sampler: float, most: int, servers: int, advice: str
) -> None:
    history = History()
    assert waits(history, most, servers) == []
    for step in range(1, 4):
        metrics = {LEARNER_WAITS: Metric(value=learner), SAMPLER_WAITS: Metric(value=sampler)}
        history.add(StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics))
    (line,) = map(spoken, waits(history, most, servers))
    assert f"{learner:.0%}" in line and f"{sampler:.0%}" in line
    assert advice in line and (bool(advice) == (";" in line))
    slow = {"time/reward_s": Metric(value=2.0), "time/rollout_s": Metric(value=1.0)}
    history.add(StepRecord(step=4, rollout=4, pass_index=0, metrics=slow))
    (line,) = map(spoken, waits(history, most, servers))
    assert ("--reward_workers" in line) == (learner > 0.2)
