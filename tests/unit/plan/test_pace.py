"""The time of a run from what another has measured: what counts as the same work, and the arithmetic."""

from dataclasses import replace
from typing import Any

import pytest

from covey.plan.batch import batch_plan
from covey.plan.facts import Facts, Measured, ResumeFacts
from covey.plan.pace import Pace, is_near, is_same_work, measured, pace
from covey.plan.report import report_json, report_lines
from support.checks import GOOD, config, facts
from support.layouts import EIGHT

MEASURED = Measured(
    path="runs/x-001",
    first_step=3,
    last_step=40,
    step_s=3.6,
    rollout_s=3.6,
    mean_length=210.4,
    completions_per_step=64,
    completions_per_rollout=64,
)
BATCH = {"completions_per_step": 64, "completions_per_rollout": 64, "steps_per_rollout": 1}


def plan_json(given: Facts = GOOD, **options: Any) -> dict[str, Any]:
    """What the plan.json of such a run holds."""
    asked = config(**options)
    return report_json(asked, given, batch_plan(asked, given.num_processes, given.num_prompts))


def record(step: int, seconds: Any, *, rollout: int | None = None, length: float = 100.0) -> dict[str, Any]:
    number = step - 1 if rollout is None else rollout
    return {
        "step": step,
        "rollout": number,
        "time/step_s": seconds,
        "completions/mean_length": length,
    }


def paced(was: Measured = MEASURED, given: Facts = GOOD, **options: Any) -> Pace | None:
    asked = config(**options)
    return pace(replace(given, measured=was), batch_plan(asked, given.num_processes, given.num_prompts))


def test_the_median_of_whole_rollouts_after_the_first_steps() -> None:
    """The first two steps are slow, one is an outlier: neither moves the median of 1, 2, 3, 4 and 90."""
    times = [50.0, 40.0, 1.0, 2.0, 3.0, 4.0, 90.0]
    got = measured("runs/a", {"batch": BATCH}, [record(n, t) for n, t in enumerate(times, start=1)])
    assert got is not None
    assert (got.step_s, got.rollout_s, got.first_step, got.last_step) == (3.0, 3.0, 3, 7)
    assert (got.path, got.mean_length, got.completions_per_step) == ("runs/a", 100.0, 64)


def test_a_rollout_of_two_steps_is_one_measurement() -> None:
    """The step that samples takes 9 s and the other 1 s: 5 s a step, and not the median of single steps.

    Of the last two rollouts one step each is there, so that neither counts.
    """
    batch = {"completions_per_step": 32, "completions_per_rollout": 64, "steps_per_rollout": 2}
    lines = []
    for step in range(2, 11):
        lines.append(record(step, 9.0 if step % 2 else 1.0, rollout=(step - 1) // 2, length=float(step)))
    got = measured("runs/a", {"batch": batch}, [*lines[:-1], record(11, 9.0, rollout=5)])
    assert got is not None
    assert (got.step_s, got.rollout_s, got.first_step, got.last_step) == (5.0, 10.0, 3, 8)
    assert got.mean_length == (3 + 5 + 7) / 3


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [record(n, 1.0) for n in range(1, 5)],
        [record(n, "nan") for n in range(1, 9)],
        [record(n, 0.0) for n in range(1, 9)],
        [record(n, 1.0, rollout=7) for n in range(1, 9)],
    ],
    ids=["none", "too few", "no number", "no time", "no whole rollout"],
)
def test_too_little_is_nothing(lines: list[dict[str, Any]]) -> None:
    assert measured("runs/a", {"batch": BATCH}, lines) is None


def test_what_is_no_record_is_an_error() -> None:
    for lines in ([{"step": 3}] * 9, [record(n, None) for n in range(1, 9)]):
        with pytest.raises((KeyError, TypeError)):
            measured("runs/a", {"batch": BATCH}, lines)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "models/other"},
        {"torch_dtype": "float32"},
        {"tuner_type": "lora"},
        {"engine": "generate"},
        {"max_completion_length": 64},
        {"dataset": "other.jsonl"},
        {"beta": 0.1},
        {"num_generations": 4},
        {"gradient_checkpointing": "true"},
    ],
)
def test_other_work(options: dict[str, Any]) -> None:
    assert not is_same_work(config(**options), GOOD, plan_json())
    assert not is_same_work(config(), GOOD, plan_json(**options))


@pytest.mark.parametrize(
    "changes", [{"num_processes": 2}, {"cuda": False}, {"nproc_available": 4}, {"cuda": None}]
)
def test_another_machine(changes: dict[str, Any]) -> None:
    assert not is_same_work(config(), facts(**changes), plan_json())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_steps": 7, "seed": 1, "learning_rate": 1e-5, "output_dir": "runs/b"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16},
        {"per_device_train_batch_size": 16, "save_steps": 3},
    ],
)
def test_the_same_work(options: dict[str, Any]) -> None:
    assert is_same_work(config(**options), GOOD, plan_json())


def test_time_in_words() -> None:
    got = paced(max_steps=200)
    assert got is not None and (got.steps, got.seconds, got.is_scaled) == (200, 720.0, False)
    assert got.in_words() == [
        "about 12 min for 200 steps, without evaluations and checkpoints: 3.6 s a step,",
        "as measured in runs/x-001, steps 3–40, 64 completions of 210 tokens on average",
    ]


def test_twice_the_completions_take_twice_the_time() -> None:
    """128 completions a step: 7.2 s. Of a rollout of 128 in two steps, each has 64: 3.6 s."""
    got = paced(max_steps=10, gradient_accumulation_steps=16)
    assert got is not None and (got.step_s, got.seconds, got.is_scaled) == (7.2, 72.0, True)
    assert got.in_words()[1].startswith("in proportion to 3.6 s as measured in runs/x-001, steps 3–40, 64 ")
    got = paced(max_steps=10, gradient_accumulation_steps=8, steps_per_generation=16)
    assert got is not None and (got.step_s, got.is_scaled) == (3.6, True)


def test_a_measured_rollout_of_two_steps_is_shared_by_both() -> None:
    was = replace(MEASURED, step_s=5.0, rollout_s=10.0, completions_per_step=32)
    got = paced(was, max_steps=4, gradient_accumulation_steps=4, steps_per_generation=8)
    assert got is not None and (got.step_s, got.seconds, got.is_scaled) == (5.0, 20.0, False)


@pytest.mark.parametrize(("accumulation", "is_said"), [(2, True), (32, True), (1, False), (64, False)])
def test_a_batch_of_another_size_altogether_has_no_time(accumulation: int, is_said: bool) -> None:
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 9}
    assert (paced(**options) is not None) == is_said
    batch = batch_plan(config(**options), 1, 1000)
    assert is_near(MEASURED, batch) == is_said


def test_only_the_steps_ahead_count() -> None:
    resumed = facts(resume=ResumeFacts(path="runs/a/checkpoint-150", step=150))
    got = paced(given=resumed, max_steps=200)
    assert got is not None and (got.steps, got.seconds) == (50, 180.0)
    assert paced(given=resumed, max_steps=150) is None


def test_nothing_is_said_of_a_machine_that_is_not_here() -> None:
    assert paced(given=facts(layout=EIGHT), max_steps=200) is None


def test_nothing_is_said_where_nothing_is_known() -> None:
    asked = config()
    batch = batch_plan(asked, 1, 1000)
    assert pace(GOOD, batch) is None
    assert "time" not in report_json(asked, GOOD, batch)
    assert not [line for line in report_lines(asked, GOOD, batch) if line.startswith("time")]


def test_the_report_has_it() -> None:
    asked = config(max_steps=200)
    batch = batch_plan(asked, 1, 1000)
    given = replace(GOOD, measured=MEASURED)
    (line,) = (line for line in report_lines(asked, given, batch) if line.startswith("time      "))
    assert "about 12 min for 200 steps" in line
    time = report_json(asked, given, batch)["time"]
    assert (time["seconds"], time["steps"], time["step_s"]) == (720.0, 200, 3.6)
    assert time["measured"]["path"] == "runs/x-001"


@pytest.mark.parametrize(
    ("step_s", "steps", "words"),
    [
        (0.099, 3, "about 1 s for 3 steps, without evaluations and checkpoints: 0.099 s a step,"),
        (0.099, 200, "about 20 s for 200 steps, without evaluations and checkpoints: 0.099 s a step,"),
        (1.0, 100, "about 1.7 min for 100 steps, without evaluations and checkpoints: 1.0 s a step,"),
        (42.0, 1000, "about 12 h for 1,000 steps, without evaluations and checkpoints: 42.0 s a step,"),
        (
            42.0,
            10_000,
            "about 4.9 days for 10,000 steps, without evaluations and checkpoints: 42.0 s a step,",
        ),
    ],
)
def test_durations(step_s: float, steps: int, words: str) -> None:
    got = paced(replace(MEASURED, step_s=step_s, rollout_s=step_s), max_steps=steps)
    assert got is not None and got.in_words()[0] == words
