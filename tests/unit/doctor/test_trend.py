"""What is called learning: not noise, whatever the length of a run and the size of its rollouts, and a small
effect, a large one, and one beside an offset all the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest

from covey.doctor.examine import Report, examine
from covey.doctor.log import Log
from covey.doctor.trend import reward_trend
from covey.types import Metric, StepRecord

Draw = Callable[[random.Random, int], float]


def history(
    seed: int, num_rollouts: int, draw: Draw, *, group: int, prompts: int, steps: int = 1, offset: float = 0.0
) -> list[StepRecord]:
    """The records of a run whose completions get `draw(rng, rollout)`; each rollout feeds `steps` steps."""
    rng = random.Random(seed)
    records = []
    for rollout in range(num_rollouts):
        groups = [[offset + draw(rng, rollout) for _ in range(group)] for _ in range(prompts)]
        flat = [value for values in groups for value in values]
        spread, num = stdev(flat), group * prompts
        metrics = {
            "reward": Metric(value=fmean(flat), count=num),
            "rewards/mine/mean": Metric(value=fmean(flat), count=num),
            "rewards/mine/std": Metric(value=spread, count=num),
            "reward_std": Metric(value=fmean(map(stdev, groups)), count=prompts),
            "frac_reward_zero_std": Metric(value=fmean(len(set(g)) == 1 for g in groups), count=prompts),
            "grad_norm": Metric(value=0.5),
        }
        for step in range(steps):
            number = rollout * steps + step + 1
            records.append(StepRecord(step=number, rollout=rollout, pass_index=0, metrics=metrics))
    return records


def report(records: Sequence[StepRecord]) -> Report:
    log = Log(source="covey", path=Path("run"), records=records, total_steps=records[-1].step)
    return examine(log, 1e10)


def uniform(rng: random.Random, rollout: int) -> float:
    return rng.random()


def coin(rng: random.Random, rollout: int) -> float:
    return float(rng.random() < 0.5)


def rare(rng: random.Random, rollout: int) -> float:
    return float(rng.random() < 0.03)


def heavy(rng: random.Random, rollout: int) -> float:
    return rng.paretovariate(1.5)


def way(records: Sequence[StepRecord]) -> int:
    trend = reward_trend(Log(source="covey", path=Path("run"), records=records))
    assert trend is not None
    return trend.way


@pytest.mark.parametrize("draw", [uniform, coin, rare, heavy])
@pytest.mark.parametrize(("group", "prompts"), [(2, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize(("num_rollouts", "steps"), [(20, 1), (60, 1), (200, 1), (20, 4), (60, 4)])
def test_noise_rises_in_one_of_twenty_runs_at_most(
    draw: Draw, group: int, prompts: int, num_rollouts: int, steps: int
) -> None:
    """And falls in as many; a rollout that feeds four steps counts once."""
    ways = [
        way(history(seed, num_rollouts, draw, group=group, prompts=prompts, steps=steps))
        for seed in range(20)
    ]
    assert ways.count(1) <= 1 and ways.count(-1) <= 1


@pytest.mark.parametrize(("num_rollouts", "steps"), [(20, 1), (24, 4)])
def test_noise_is_not_called_learning(num_rollouts: int, steps: int) -> None:
    runs = [
        report(history(seed, num_rollouts, uniform, group=4, prompts=4, steps=steps)) for seed in range(20)
    ]
    assert sum(run.verdict == "learning" for run in runs) <= 1
    assert sum(run.exit_code != 0 for run in runs) <= 1


def rises(start: float, end: float, at: float, width: float) -> Draw:
    """A share of right answers that goes from `start` to `end` around the rollout `at`."""

    def draw(rng: random.Random, rollout: int) -> float:
        share = start + (end - start) / (1 + math.exp(-(rollout - at) / width))
        return float(rng.random() < share)

    return draw


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0, 1e6])
@pytest.mark.parametrize(
    ("num_rollouts", "draw"),
    [(36, rises(0.05, 0.7, 8, 2.5)), (20, rises(0.05, 0.7, 10, 2)), (100, rises(0.4, 0.55, 50, 10))],
)
def test_learning_is_called_so_at_every_offset(num_rollouts: int, draw: Draw, offset: float) -> None:
    runs = [report(history(seed, num_rollouts, draw, group=8, prompts=8, offset=offset)) for seed in range(2)]
    assert [run.verdict for run in runs] == ["learning"] * 2
    ways = [way(history(seed, num_rollouts, draw, group=8, prompts=4, offset=offset)) for seed in range(5)]
    assert ways == [1] * 5
    first, last = runs[0].summary.split(",")[0].removeprefix("mean reward ").split(" -> ")
    assert float(last) - float(first) > 0.05


@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0])
def test_a_fall_is_seen_at_every_offset(offset: float) -> None:
    """0.7 to 0.1 from rollout 30 on."""
    draw = rises(0.7, 0.1, 30, 1)
    for seed in range(2):
        found = report(history(seed, 60, draw, group=8, prompts=8, offset=offset))
        assert (found.verdict, found.exit_code) == ("getting worse", 3)
        seen = found.sightings[0].finding.seen
        assert found.sightings[0].finding.code == "F222"
        before, after = seen.split("reward ")[1].split(" -> ")
        assert 0.3 < float(before.split()[0]) - float(after.split()[0]) < 0.8


@pytest.mark.parametrize(("last", "codes"), [(0.6, ["F215"]), (0.7, [])])
def test_a_slow_fall_is_named_where_no_rule_speaks(last: float, codes: list[str]) -> None:
    """0.7 to 0.6 is less than the quarter that F222 asks for."""
    for seed in range(3):
        found = report(history(seed, 200, rises(0.7, last, 100, 10), group=8, prompts=16))
        assert [s.finding.code for s in found.sightings] == codes
        assert (found.verdict, found.exit_code) == (("not learning", 3) if codes else ("healthy", 0))


def test_a_level_reward_with_an_offset_has_not_fallen() -> None:
    for offset in (3.0, 1000.0):
        for seed in range(4):
            found = report(history(seed, 40, coin, group=8, prompts=8, offset=offset))
            assert found.exit_code == 0, found.summary


def test_a_solved_run_is_solved_at_every_offset() -> None:
    def draw(rng: random.Random, rollout: int) -> float:
        return 1.0 if rollout > 25 else rises(0.2, 1.0, 12, 3)(rng, rollout)

    def stuck(rng: random.Random, rollout: int) -> float:
        return 0.5 if rollout > 25 else rises(0.2, 1.0, 12, 3)(rng, rollout)

    for offset in (0.0, 1000.0, -1000.0):
        assert report(history(1, 60, draw, group=8, prompts=8, offset=offset)).exit_code == 0
        found = report(history(1, 60, stuck, group=8, prompts=8, offset=offset))
        assert found.exit_code == 3


def test_selected_groups_do_not_say_how_good_the_policy_is() -> None:
    """What is learnt from has the reward 0.5 throughout, while what is sampled rises."""
    records = history(3, 40, rises(0.05, 0.7, 12, 3), group=8, prompts=8)
    chosen = [
        StepRecord(
            step=r.step,
            rollout=r.rollout,
            pass_index=0,
            metrics={
                **{f"sampled/{n}": m for n, m in r.metrics.items()},
                "reward": Metric(value=0.5, count=64),
            },
        )
        for r in records
    ]
    assert report(chosen).verdict == "learning"
