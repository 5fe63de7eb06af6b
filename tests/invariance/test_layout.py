"""Padded, packed and prefix-shared streams give the same gradients and updates, family by family.

A run on replayed rollouts is repeated with each layout forced. A model with convolutions or linear attention
is put on padded rows by the probe and trains there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.training.facts import survey
from covey.training.run import build_job
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, save_model
from support.runs import (
    difference,
    options,
    relative_difference,
    total_norm,
    train_and_watch,
    write_rollouts,
)


@pytest.mark.parametrize("family", STREAM_FAMILIES)
def test_layouts_agree(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=5)
    results = {
        stream: train_and_watch(options(model, tmp_path / stream, replay), stream=stream)
        for stream in ("padded", "packed", "prefix")
    }
    padded = results["padded"]
    moved = total_norm(difference(padded.after, padded.before))
    for stream in ("packed", "prefix"):
        overall, worst = relative_difference(results[stream].gradients[0], padded.gradients[0])
        assert overall <= 1e-5, f"{stream}: {overall:.2e}"
        assert worst <= 1e-4, f"{stream}: {worst:.2e}"
        gap = total_norm(difference(results[stream].after, padded.after))
        assert gap <= 1e-3 * moved, f"{stream}: {gap / moved:.2e}"


@pytest.mark.parametrize("family", LEAKING_FAMILIES)
def test_leaking_families_train_on_padded_rows(family: str, tmp_path: Path) -> None:
    """The probe finds the leak; forcing a stream all the same would change the gradient."""
    model = save_model(family, tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay", rollouts=2)
    opts = options(model, tmp_path / "run", replay, max_steps=2)
    resolved = from_dict(opts)
    job = build_job(resolved, survey(resolved.config, 1), LocalComm())
    assert job.backend.policy.stream == "padded"
    assert isinstance(job.engine, GenerateEngine)
    assert not isinstance(job.engine, NativeEngine)
    padded = train_and_watch({**opts, "output_dir": str(tmp_path / "padded")})
    forced = train_and_watch({**opts, "output_dir": str(tmp_path / "forced")}, stream="packed")
    overall, _ = relative_difference(forced.gradients[0], padded.gradients[0])
    assert overall > 1e-3


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path / "model")
    replay = write_rollouts(tmp_path / "replay")
    plain = train_and_watch(options(model, tmp_path / "plain", replay))
    again = train_and_watch(options(model, tmp_path / "again", replay, gradient_checkpointing=True))
    overall, worst = relative_difference(again.gradients[0], plain.gradients[0])
    assert overall <= 1e-6
    assert worst <= 1e-5
