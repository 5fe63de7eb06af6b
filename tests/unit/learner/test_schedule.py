"""The learning rate as a function of the step, by hand and against transformers' schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from covey.learner.schedule import Schedule
from support.options import learner

PEAK = 2e-6


def schedule_of(kind: str, *, warmup: int, total: int) -> Schedule:
    return Schedule(learner(learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup), total)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Warm-up 4 of 12 steps: step 8 is half of the rest done, step 10 three quarters.
        ("constant", {0: 0.0, 1: 0.25, 2: 0.5, 4: 1.0, 8: 1.0, 12: 1.0, 500: 1.0}),
        ("constant_with_warmup", {0: 0.0, 3: 0.75, 4: 1.0, 8: 1.0, 12: 1.0}),
        ("linear", {0: 0.0, 2: 0.5, 4: 1.0, 6: 0.75, 8: 0.5, 10: 0.25, 12: 0.0, 13: 0.0}),
        ("cosine", {0: 0.0, 2: 0.5, 4: 1.0, 8: 0.5, 10: 0.5 * (1 - math.sqrt(0.5)), 12: 0.0}),
    ],
)
def test_by_hand(kind, expected):
    schedule = schedule_of(kind, warmup=4, total=12)
    assert {s: schedule.at(s) / PEAK for s in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_transformers_gives_the_same(kind, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=17)
    ours = schedule_of(kind, warmup=warmup, total=17)
    for step in range(17):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("ends", [{"min_lr": 2e-7}, {"min_lr_rate": 0.25}])
@pytest.mark.parametrize("warmup", [0, 5])
def test_a_cosine_that_ends_above_zero(ends, warmup):
    kind = "cosine_with_min_lr"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=17, scheduler_specific_kwargs=ends
    )
    options = learner(
        learning_rate=PEAK, lr_scheduler_type=kind, lr_scheduler_kwargs=ends, warmup_steps=warmup
    )
    ours = Schedule(options, 17)
    for step in range(17):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        theirs.step()
    assert ours.at(17) == pytest.approx(ends.get("min_lr", 0.25 * PEAK))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_without_warmup_the_first_step_has_the_peak(kind):
    assert schedule_of(kind, warmup=0, total=3).at(0) == PEAK


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_nothing_but_warmup(kind):
    schedule = schedule_of(kind, warmup=3, total=3)
    assert [schedule.at(s) / PEAK for s in range(3)] == pytest.approx([0, 1 / 3, 2 / 3])


def test_a_warmup_as_a_share_is_rounded_to_steps():
    schedule = Schedule(learner(learning_rate=PEAK, warmup_ratio=0.25), 6)
    assert [schedule.at(s) / PEAK for s in range(3)] == pytest.approx([0, 1 / 2, 1])
