"""Padded, packed and prefix-shared streams give the same gradients and updates, family by family.

A run on replayed rollouts is repeated with each layout forced. A model with convolutions or linear attention
is put on padded rows by the probe and trains there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.training.build import build_job
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, save_model
from support.runs import (
    Result,
    difference,
    options,
    relative_difference,
    total_norm,
    train_and_watch,
    write_rollouts,
)


def assert_same(actual: Result, expected: Result) -> None:
    """Equal gradients of the first step, overall and tensor by tensor, and equal updates after five."""
    overall, worst = relative_difference(actual.gradients[0], expected.gradients[0])
    assert overall <= 1e-5, f"{overall:.2e}"
    assert worst <= 1e-4, f"{worst:.2e}"
    moved = total_norm(difference(expected.after, expected.before))
    gap = total_norm(difference(actual.after, expected.after))
    assert gap <= 1e-3 * moved, f"{gap / moved:.2e}"


@pytest.mark.parametrize("family", STREAM_FAMILIES)
def test_layouts_agree(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=5)
    results = {
        stream: train_and_watch(options(model, tmp_path / stream, replay), stream=stream)
        for stream in ("padded", "packed", "prefix")
    }
    for stream in ("packed", "prefix"):
        assert_same(results[stream], results["padded"])
        # The comparison itself: a zeroed, negated or doubled gradient or update does not pass.
        good = results["padded"]
        moved = difference(good.after, good.before)
        for factor in (0.0, -1.0, 2.0):
            scaled = {k: factor * v for k, v in results[stream].gradients[0].items()}
            with pytest.raises(AssertionError):
                assert_same(replace(results[stream], gradients=[scaled]), good)
            with pytest.raises(AssertionError):
                wrong = {k: good.before[k] + factor * v for k, v in moved.items()}
                assert_same(replace(results[stream], after=wrong), good)


@pytest.mark.parametrize("family", LEAKING_FAMILIES)
def test_leaking_families_train_on_padded_rows(family: str, tmp_path: Path) -> None:
    """The probe finds the leak; forcing a stream all the same would change the gradient."""
    model = save_model(family, tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=2)
    opts = options(model, tmp_path / "run", replay, max_steps=2)
    resolved = from_dict(opts)
    job = build_job(resolved, survey(resolved.config, 1), LocalComm())
    assert job.backend.policy.stream == "padded"
    assert isinstance(job.publisher.engine, GenerateEngine)
    assert not isinstance(job.publisher.engine, NativeEngine)
    padded = train_and_watch({**opts, "output_dir": str(tmp_path / "padded")})
    forced = train_and_watch({**opts, "output_dir": str(tmp_path / "forced")}, stream="packed")
    overall, _ = relative_difference(forced.gradients[0], padded.gradients[0])
    assert overall > 1e-3


def test_what_is_kept_and_what_attends_change_nothing(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay")
    plain = train_and_watch(options(model, tmp_path / "plain", replay))
    cases = {
        "full": {"gradient_checkpointing": True},
        "selective": {"gradient_checkpointing": "selective"},
        "auto": {"gradient_checkpointing": "auto"},
        "offloaded": {"activation_offloading": True},
    }
    for name, changes in cases.items():
        again = train_and_watch(options(model, tmp_path / name, replay, **changes))
        for found, expected in zip(again.gradients, plain.gradients, strict=True):
            assert relative_difference(found, expected) == (0.0, 0.0), name
    assert_same(train_and_watch(options(model, tmp_path / "eager", replay, attn_impl="eager")), plain)
