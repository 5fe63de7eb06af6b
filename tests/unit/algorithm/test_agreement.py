"""The line through an engine's logprobs over the learner's, the largest gap, and the sample size."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.agreement import agreement_metrics, agreement_sums


def metrics(engine: list[float], learner: list[float]) -> dict[str, float | None]:
    e, x = torch.tensor(engine), torch.tensor(learner)
    largest = float((e - x).abs().max()) if len(engine) else None
    return agreement_metrics(agreement_sums(e, x).tolist(), largest)


def test_by_hand() -> None:
    # Through (-1, -1), (-2, -3), (-3, -2): x̄ = ȳ = -2, Sxy = 1, Sxx = 2.
    found = metrics([-1.0, -3.0, -2.0], [-1.0, -2.0, -3.0])
    r = [1.0, math.e, math.exp(-1.0)]
    assert found == {
        "sampling/logprob_slope": pytest.approx(0.5),
        "sampling/logprob_intercept": pytest.approx(-1.0),
        "sampling/logprob_max_gap": 1.0,
        "sampling/ess": pytest.approx(sum(r) ** 2 / (3 * sum(x * x for x in r))),
    }


def test_equal_engines() -> None:
    found = metrics([-0.1, -2.0, -7.5], [-0.1, -2.0, -7.5])
    assert found["sampling/logprob_slope"] == pytest.approx(1.0, abs=1e-12)
    assert found["sampling/logprob_intercept"] == pytest.approx(0.0, abs=1e-12)
    assert (found["sampling/logprob_max_gap"], found["sampling/ess"]) == (0.0, 1.0)


def test_another_scale_shows_in_the_slope() -> None:
    generator = torch.Generator().manual_seed(0)
    learner = -torch.rand(1000, generator=generator) * 8
    found = agreement_metrics(agreement_sums(0.7 * learner - 0.2, learner).tolist(), 1.0)
    assert found["sampling/logprob_slope"] == pytest.approx(0.7, abs=1e-6)
    assert found["sampling/logprob_intercept"] == pytest.approx(-0.2, abs=1e-6)
    assert found["sampling/ess"] < 0.9


def test_sums_add_up_over_parts() -> None:
    engine, learner = torch.linspace(-4, -1, 50), torch.linspace(-5, 0, 50)
    parts = [agreement_sums(e, x) for e, x in zip(engine.split(13), learner.split(13), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), agreement_sums(engine, learner))


def test_no_line_where_there_is_none() -> None:
    nothing = agreement_metrics([0.0] * 7, None)
    assert set(nothing.values()) == {None}
    flat = metrics([-1.0, -1.5], [-1.0, -1.0])
    assert flat["sampling/logprob_slope"] is flat["sampling/logprob_intercept"] is None
    assert flat["sampling/ess"] is not None
    assert math.isfinite(metrics([-1e4, -1.0], [0.0, -2.0])["sampling/ess"])
