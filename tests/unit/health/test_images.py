"""Guards of a step know which weights have a gradient through images alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.health.guards.invariants import StepFacts, check_step
from covey.types import Batch, Metric, StepResult, StepStats

TOWER, UP = "model.visual.blocks.0.weight", "model.visual.blocks.1.weight"
TEXT = "model.layers.0.weight"


def stats(*untouched: str, norm: float = 1.0) -> StepStats:
    return StepStats(
        grad_norm=norm,
        grad_norm_clipped=norm,
        learning_rate=1e-6,
        update_ratio=1e-3,
        frac_params_changed=1.0,
        untouched=untouched,
    )


def code(found: StepStats, **facts: Any) -> str | None:
    """The code that a step is stopped with."""
    batch = cast(Batch, SimpleNamespace(micro_batches=(), has_signal=(True,)))
    metrics = {name: Metric(value=0.0) for name in ("loss", "kl", "sampling/sampling_logp_difference/mean")}
    held = StepFacts(
        step=1,
        is_fresh=True,
        is_start=False,
        sampler_gap=0.01,
        gradient_gap=1e-3,
        peak_rate=1e-6,
        may_lack=("expert",),
        of_images=frozenset({TOWER, UP}),
        **facts,
    )
    try:
        check_step(batch, StepResult(stats=found, metrics=metrics), held, LocalComm())
    except GuardStop as stop:
        return stop.finding.code
    return None


def test_a_step_of_text_leaves_what_sees() -> None:
    assert code(stats(TOWER, UP)) is None
    assert code(stats(TOWER, UP, "model.experts.0")) is None


@pytest.mark.parametrize(
    ("untouched", "has_images"),
    [
        ((TOWER, UP), True),
        ((TOWER,), True),
        # The other one has a gradient, so there was an image, whatever is known of the rows.
        ((TOWER,), False),
        ((TEXT, TOWER, UP), False),
        ((TEXT,), True),
    ],
)
def test_a_tensor_that_lost_its_gradient_is_named(untouched: tuple[str, ...], has_images: bool) -> None:
    assert code(stats(*untouched), has_images=has_images) == "F124"


def test_matrices_of_adapters_wait_for_the_first_image() -> None:
    """A has no gradient while B is 0, however many steps of text there were."""
    assert code(stats(TOWER), has_images=True, images_may_lack=(TOWER,)) is None
    assert code(stats(TEXT), has_images=True, images_may_lack=(TEXT,)) == "F124"


def test_a_step_of_text_has_no_gradient_where_only_what_sees_is_trained() -> None:
    nothing = stats(TOWER, UP, norm=0.0)
    assert code(nothing, only_images=True) is None
    assert code(nothing, only_images=True, has_images=True) == "F102"
    assert code(nothing) == "F102"
