"""Padded, packed and prefix-shared streams give the same gradients and updates, family by family.

A run on replayed rollouts is repeated with each layout forced. A model with convolutions or linear attention
is put on padded rows by the probe and trains there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.selftest.compare import far
from covey.training.build import build_job
from support.exactness import assert_same_steps, assert_sees, worst
from support.models import LEAKING_FAMILIES, STREAM_FAMILIES, save_model
from support.runs import (
    options,
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
    for stream in ("packed", "prefix"):
        assert_same_steps(results[stream], results["padded"])
    assert_sees(assert_same_steps, results["padded"])


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
    assert far(forced.gradients[0], padded.gradients[0]) > 1e-3


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
            assert far(found, expected) == worst(found, expected) == 0.0, name
    assert_same_steps(train_and_watch(options(model, tmp_path / "eager", replay, attn_impl="eager")), plain)
