"""Every planted fault is named by its own code, at the first step at which it can show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from covey.checks.judge import refuse_faults
from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.types import Problem
from mutants import (
    faults,
    faults_images,
    faults_inputs,
    faults_publish,
    faults_selection,
    faults_turns,
    stories,
)
from mutants.harness import BASE, Mutant, Surveys, nothing, run_with

MUTANTS = (
    *faults.MUTANTS,
    *faults_selection.MUTANTS,
    *faults_inputs.MUTANTS,
    *faults_publish.MUTANTS,
    *faults_turns.MUTANTS,
    *faults_images.MUTANTS,
    *stories.MUTANTS,
)
# The runs in which the fault is planted; where the options are the fault there is none without it.
PLANTED = [m for m in MUTANTS if m.plant is not nothing and (m.options or m.is_resumed)]
HEALTHY = {str((m.family, m.options, m.is_resumed)): replace(m, name="none", plant=nothing) for m in PLANTED}
TYPED = [m for m in MUTANTS if m.is_refused and m.plant is nothing]


@pytest.fixture(scope="module")
def surveys() -> Iterator[Surveys]:
    kept = Surveys()
    yield kept
    kept.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_named(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    seen = run_with(mutant, surveys, tmp_path / "run")
    assert (seen.code, seen.step) == (mutant.code, mutant.step)
    assert mutant.says in seen.words
    assert not (mutant.is_refused and (tmp_path / "run").exists())


@pytest.mark.parametrize("name", ["forwards a row twice", "steps other tensors than the model's"])
def test_without_guards_the_run_goes_on(name: str, surveys: Surveys, tmp_path: Path) -> None:
    """Switched off, the guards of a batch and of a step say nothing of a fault."""
    (mutant,) = (m for m in MUTANTS if m.name == name)
    seen = run_with(replace(mutant, options={**mutant.options, "guards": False}), surveys, tmp_path / "run")
    assert seen.code is None
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("healthy", HEALTHY.values(), ids=HEALTHY.keys())
def test_the_same_run_without_a_fault_is_silent(healthy: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    assert run_with(healthy, surveys, tmp_path / "run").code is None


def test_tokens_that_have_no_choice_stop_nothing(surveys: Surveys, tmp_path: Path) -> None:
    """Twenty steps in which filters leave most tokens alone, so that many passes have no gradient: that all
    completions of a prompt are the same is said, and no guard sees a fault."""
    alone = Mutant("none", "", 1, nothing, {"top_p": 0.3, "max_steps": 20})
    assert run_with(alone, surveys, tmp_path / "run").code in (None, "F211", "F212")
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    shares = [record["kept/singletons"] for record in records]
    assert len(shares) == 20 and min(shares) > 0.8


@pytest.mark.parametrize("healthy", faults_publish.HEALTHY, ids=lambda m: m.name)
def test_an_engine_with_weights_of_its_own_is_silent(
    healthy: Mutant, surveys: Surveys, tmp_path: Path
) -> None:
    """It publishes once a rollout, and says each time that the engine holds the weights."""
    assert run_with(healthy, surveys, tmp_path / "run").code is None
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    published = [event for event in map(json.loads, lines) if event["kind"] == "published"]
    num_steps = 1 if "steps_per_generation" not in healthy.options else 2
    assert [event["version"] for event in published] == list(range(0, 3, num_steps))
    assert len({event["digest"] for event in published}) == len(published)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["publish/bytes"] == published[-1]["bytes"] > 1e6
    assert metrics["publish/canary_gap"] == published[-1]["canary_gap"]
    assert 0 < metrics["time/publish_s"] < metrics["time/step_s"]


@pytest.mark.parametrize("mutant", TYPED, ids=lambda m: m.name)
def test_what_a_refusal_offers_is_accepted(mutant: Mutant, surveys: Surveys, tmp_path: Path) -> None:
    """Whoever types the first edit of every problem has a run."""
    options = {**BASE, **mutant.options, "output_dir": str(tmp_path / "run")}
    facts = surveys.of(options, 1).facts
    with pytest.raises(ConfigError) as refused:
        refuse_faults(from_dict(options, 1), facts)
    problems: list[Problem] = [p for p in refused.value.problems if p.code in mutant.code.split()]
    edits = [next(fix.edits for fix in p.fixes if fix.edits) for p in problems]
    assert len(edits) == len(mutant.code.split())
    for change in edits:
        options |= change
    refuse_faults(from_dict(options, 1), facts)
