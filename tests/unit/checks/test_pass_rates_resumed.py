"""A resumed run goes on with the pass rates that it began with, or with others by the user's word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from covey.checks.pass_rates.judge import is_reordered
from covey.plan.facts import PassRateFacts, ResumeFacts
from support.checks import GOOD, config, facts, found, one

OPTIONS = {"pass_rates": "rates.jsonl", "min_pass_rate": 0.1, "resume_from_checkpoint": "latest"}
RATED = PassRateFacts(where="rates.jsonl", digest="new", num_rows=9, num_measured=9, num_kept=8)
SAME = ResumeFacts(path="runs/a/checkpoint-3", step=3, pass_rates="new")
OTHER = replace(SAME, pass_rates="old")


def given(resume: ResumeFacts, rates: PassRateFacts | None = RATED):
    return facts(output={"resume": resume, "state": "run"}, data={"pass_rates": rates})


def reordered(resume: ResumeFacts, rates: PassRateFacts | None = RATED, **options: Any) -> bool:
    known = given(resume, rates)
    return is_reordered(config(**options), known.data, known.output)


def test_the_same_measurement_goes_on() -> None:
    assert found(given(SAME), **OPTIONS) == []
    assert not reordered(SAME, **OPTIONS, allow_changes=True)


def test_another_needs_a_word() -> None:
    problem = one(given(OTHER), **OPTIONS)
    assert (problem.code, problem.option) == ("E405", "pass_rates")
    assert "has other pass rates now than when runs/a/checkpoint-3 was saved" in problem.seen
    assert dict(problem.fixes[0].edits) == {"allow_changes": True}
    assert found(given(OTHER), **OPTIONS, allow_changes=True) == []


def test_rows_may_come_in_another_order_by_that_word_alone() -> None:
    assert not reordered(OTHER, **OPTIONS)
    assert reordered(OTHER, **OPTIONS, allow_changes=True)
    changed = replace(SAME, config_changes=(("min_pass_rate", 0.2, 0.1),))
    assert reordered(changed, **OPTIONS, allow_changes=True)
    other = replace(SAME, config_changes=(("beta", 0.0, 0.1),))
    assert not reordered(other, **OPTIONS, allow_changes=True)
    assert not is_reordered(config(**OPTIONS, allow_changes=True), GOOD.data, GOOD.output)


def test_other_prompts_by_that_word_are_those_of_options_that_draw_them() -> None:
    """E405 says to type --allow_changes: what it allows is not refused (F126) as the run begins."""
    for change in (
        ("dataset", ["a.jsonl"], ["b.jsonl"]),
        ("generation_batch_size", 8, 4),
        ("num_generations", 4, 8),
        ("system", None, "r1"),
    ):
        resume = ResumeFacts(path="runs/a/checkpoint-3", step=3, config_changes=(change,))
        assert reordered(resume, None, allow_changes=True)
        assert not reordered(resume, None)


def test_a_column_changes_with_its_data() -> None:
    column = replace(RATED, digest="")
    assert found(given(OTHER, column), **OPTIONS) == []
