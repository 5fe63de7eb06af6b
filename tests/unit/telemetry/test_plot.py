from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest

from covey.errors import CoveyError
from covey.telemetry.files import RunFiles, read_metrics
from covey.telemetry.plot import Series, part_series, plot_rewards, series, smooth, summary
from covey.types import Metric, StepRecord


def write_run(path: Path, rewards: list[float | None], parts: tuple[str, ...] = ()) -> Path:
    files = RunFiles(path)
    for step, reward in enumerate(rewards, start=1):
        values: dict[str, float | None] = {"reward": reward, "completions/mean_length": 30.0 - step / 40}
        values |= {f"rewards/{part}/mean": reward for part in parts}
        metrics = {name: Metric(value=value) for name, value in values.items()}
        files.append_metrics(StepRecord(step=step, rollout=step - 1, pass_index=0, metrics=metrics))
    return files.metrics_path


def read_png(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def rising(num_steps: int) -> list[float | None]:
    noise = random.Random(0)
    return [min(1.0, max(0.0, step / num_steps + noise.gauss(0, 0.05))) for step in range(num_steps)]


def test_the_figure_has_its_size_and_shows_the_data(tmp_path: Path) -> None:
    import matplotlib.image

    path = write_run(tmp_path / "run", rising(60), parts=("accuracy", "format"))
    png = tmp_path / "new" / "reward.png"
    plot_rewards(path, png, title="two-digit addition")
    assert read_png(png) == (1600, 1000)
    assert [p.name for p in png.parent.iterdir()] == ["reward.png"]
    pixels = matplotlib.image.imread(str(png))[..., :3]
    for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)):
        near = abs(pixels - [channel / 255 for channel in color]).max(axis=-1) < 0.02
        assert near.sum() > 300, color


@pytest.mark.parametrize(
    "rewards",
    [[0.5], [0.0, 0.0], [None, math.nan, 0.25], [-3.0, 5.0, 1e9]],
    ids=["one", "flat", "gaps", "wild"],
)
def test_any_recorded_run_can_be_drawn(tmp_path: Path, rewards: list[float | None]) -> None:
    plot_rewards(write_run(tmp_path / "run", rewards), tmp_path / "p.png", title="$x_ {中")
    assert read_png(tmp_path / "p.png") == (1600, 1000)


@pytest.mark.parametrize("rewards", [[], [None, math.nan]])
def test_a_run_without_reward_is_refused_by_name(tmp_path: Path, rewards: list[float | None]) -> None:
    path = write_run(tmp_path, rewards)
    with pytest.raises(CoveyError, match=r"metrics\.jsonl has no step with a reward"):
        plot_rewards(path, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_steps_without_a_finite_value_are_left_out(tmp_path: Path) -> None:
    records = read_metrics(write_run(tmp_path, [None, 0.25, math.inf, 0.75]))
    assert series(records, "reward") == Series(name="reward", steps=(2, 4), values=(0.25, 0.75))
    assert series(records, "absent").steps == ()


def test_a_lone_part_that_is_the_reward_is_not_drawn_twice(tmp_path: Path) -> None:
    one = read_metrics(write_run(tmp_path / "1", [0.0, 1.0], parts=("accuracy",)))
    assert part_series(one, series(one, "reward")) == []
    two = read_metrics(write_run(tmp_path / "2", [0.0, 1.0], parts=("b", "a")))
    assert [s.name for s in part_series(two, series(two, "reward"))] == ["rewards/a/mean", "rewards/b/mean"]


def test_the_reward_of_each_task_is_drawn(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (1, 2):
        values = {"reward": 0.5, "rewards/a/mean": 0.5, "tasks/math/rewards/a/mean": 0.7}
        values |= {"tasks/math/reward": 0.25 * step, "tasks/math/reward_std": 0.1}
        metrics = {name: Metric(value=value) for name, value in values.items()}
        files.append_metrics(StepRecord(step=step, rollout=step - 1, pass_index=0, metrics=metrics))
    records = read_metrics(files.metrics_path)
    drawn = part_series(records, series(records, "reward"))
    assert [s.name for s in drawn] == ["rewards/a/mean", "tasks/math/reward"]
    assert drawn[1].values == (0.25, 0.5)
    plot_rewards(files.metrics_path, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 10_000


def test_smoothing_keeps_a_straight_line_and_quiets_noise() -> None:
    line = [0.25 + 0.5 * i / 99 for i in range(100)]
    # At the ends the mean is of one side alone.
    assert smooth(line)[8:-8] == pytest.approx(line[8:-8], abs=1e-12)
    assert smooth(line) == sorted(smooth(line))
    noise = random.Random(1)
    noisy = [value + noise.gauss(0, 0.05) for value in line]
    errors = [math.dist(values, line) for values in (noisy, smooth(noisy))]
    assert errors[1] < errors[0] / 2
    assert smooth([3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0] and smooth([]) == []
    step = [0.0] * 50 + [1.0] * 50
    assert min(smooth(step)) >= 0 and max(smooth(step)) <= 1


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            [0.1] * 10 + [0.5] * 90,
            "Mean reward 0.100 in the first tenth, 0.500 in the last tenth; 100 steps",
        ),
        ([1.0, 0.0], "Mean reward 1.00 in the first step, 0 in the last step; 2 steps"),
    ],
)
def test_the_summary_says_what_happened(values: list[float], sentence: str) -> None:
    reward = Series(name="reward", steps=tuple(range(1, len(values) + 1)), values=tuple(values))
    assert summary(reward) == sentence
