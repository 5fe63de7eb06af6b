"""Advice never proposes what the run has already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.health.guards.invariants import EngineName, StepFacts, check_step
from covey.health.history import History
from covey.health.rules import Rules
from covey.health.signs.collapse import _pull, _wider
from covey.types import Batch, Fix, Metric, StepRecord, StepResult, StepStats


def test_a_fix_that_changes_nothing_is_left_out() -> None:
    history = History(options={"loss_type": "dapo", "beta": 0.0, "engine": "native"})
    words, other = Fix(text="look"), Fix(text="beta", edits={"beta": 0.04})
    both = Fix(text="both", edits={"loss_type": "dapo", "beta": 0.04})
    fixes = (Fix(text="dapo", edits={"loss_type": "dapo"}), words, other, both)
    assert history.changing(fixes) == (words, other, both)
    unknown = Fix(text="unknown", edits={"optim": "sgd"})
    assert history.changing((unknown,)) == (unknown,)


def _grown(**options: Any) -> tuple[Fix, ...]:
    """The fixes of a run whose completions grow eightfold while it gets no better."""
    rules = Rules({"learning_rate": 1e-6, **options})
    found = []
    for step in range(1, 60):
        values = {"reward": 0.3, "completions/mean_length": 50.0 if step < 20 else 400.0}
        metrics = {name: Metric(value=value, count=64) for name, value in values.items()}
        found += rules.check(StepRecord(step=step, rollout=step - 1, pass_index=0, metrics=metrics))
    (finding,) = [f for f in found if f.code == "F203"]
    return finding.fixes


def test_a_rule_names_another_loss_only_where_there_is_another_one() -> None:
    assert {"loss_type": "dapo"} in [dict(fix.edits) for fix in _grown(loss_type="grpo")]
    fixes = [dict(fix.edits) for fix in _grown(loss_type="dapo")]
    assert fixes and {"loss_type": "dapo"} not in fixes


def test_what_is_there_already_is_made_larger() -> None:
    known: dict[str, Any] = {"epsilon_high": 0.28, "num_iterations": 1.0}
    assert _wider(History(options=known)).edits == {"entropy_coef": 0.001}
    assert _wider(History(options={**known, "entropy_coef": 0.01})).edits == {"entropy_coef": 0.02}
    assert _pull(History(options={"beta": 0.0})).edits == {"beta": 0.04}
    assert _pull(History(options={"beta": 0.1})).edits == {"beta": 0.2}


def _stopped(stats: StepStats, gap: float, **facts: Any) -> GuardStop:
    batch = cast(Batch, SimpleNamespace(micro_batches=(), has_signal=(True,)))
    metrics = {name: Metric(value=0.0) for name in ("loss", "kl")}
    metrics["sampling/sampling_logp_difference/mean"] = Metric(value=gap)
    held = StepFacts(
        **{
            **{"step": 1, "is_fresh": True, "is_start": False, "sampler_gap": 0.01, "gradient_gap": 1e-3},
            **{"peak_rate": 1e-6, "may_lack": ()},
            **facts,
        }
    )
    with pytest.raises(GuardStop) as stop:
        check_step(batch, StepResult(stats=stats, metrics=metrics), held, LocalComm())
    return stop.value


MOVED = StepStats(
    grad_norm=1.0, grad_norm_clipped=1.0, learning_rate=1e-6, update_ratio=1e-3, frac_params_changed=1.0
)


@pytest.mark.parametrize(
    ("engine", "edits"),
    [("native", {"engine": "generate"}), ("vllm", {"use_vllm": False}), ("servers", {}), ("generate", {})],
)
def test_a_sampler_that_differs_is_compared_with_another_engine(
    engine: EngineName, edits: dict[str, Any]
) -> None:
    finding = _stopped(MOVED, 0.02, engine=engine).finding
    assert finding.code == "F115" and [dict(fix.edits) for fix in finding.fixes] == [edits]
    assert ("report" in str(finding.fixes[0].text)) == (engine == "generate")


@pytest.mark.parametrize(("rate", "edits"), [(1e-9, {"learning_rate": 1e-6}), (1e-4, {})])
def test_weights_that_stay_ask_for_a_larger_rate_only_where_it_is_small(
    rate: float, edits: dict[str, Any]
) -> None:
    stayed = StepStats(
        grad_norm=1.0, grad_norm_clipped=1.0, learning_rate=rate, update_ratio=0.0, frac_params_changed=0.0
    )
    finding = _stopped(stayed, 0.0, peak_rate=rate).finding
    assert finding.code == "F103" and [dict(fix.edits) for fix in finding.fixes] == [edits]
