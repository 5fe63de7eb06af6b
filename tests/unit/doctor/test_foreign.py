"""The logs of TRL and ms-swift, in the forms that these tools write."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey.doctor.examine import Report, examine
from covey.doctor.read import read_run

from .conftest import RunMaker

LATER = 10**10


def report(path: Path) -> Report:
    return examine(read_run(path), LATER)


def codes(found: Report) -> list[str]:
    return [s.finding.code for s in found.sightings]


def test_a_healthy_run_of_trl(make: RunMaker) -> None:
    """The newest checkpoint's log is read; the summary at its end is no step."""
    path = make.trl(40, {"kl": 1e-3, "loss": 0.0})
    found = report(path)
    assert (found.verdict, found.exit_code, codes(found)) == ("healthy", 0, [])
    assert found.log.source == "TRL" and found.log.last_step == 40 and len(found.log.records) == 40
    loss = dict(found.evidence)["loss"]
    assert "near 0 at 40 of 40 steps. That is normal on fresh samples" in loss
    state = path / "checkpoint-20" / "trainer_state.json"
    assert report(state).log.last_step == 20


def test_a_trl_log_of_every_tenth_step(make: RunMaker) -> None:
    """Entropy collapses at step 310; the fifth value in a row of the mean of five is at 390 or 400."""
    found = report(make.trl(400, {"entropy": lambda s: 0.5 if s <= 300 else 0.01}, every=10))
    assert (found.verdict, codes(found)) == ("collapsed", ["F201"])
    assert found.sightings[0].finding.step == 390


def test_an_evaluation_joins_its_step(make: RunMaker) -> None:
    path = make.trl(10)
    state = path / "checkpoint-10" / "trainer_state.json"
    content = json.loads(state.read_text())
    content["log_history"].insert(5, {"step": 5, "eval_reward": 0.75, "eval_runtime": 3.0})
    state.write_text(json.dumps(content))
    found = report(path)
    assert len(found.log.records) == 10
    assert dict(found.evidence)["held-out"].startswith("best 0.75 at step 5")


@pytest.mark.parametrize(
    ("changes", "first", "verdict"),
    [
        ({"grad_norm": 0.0}, "F216", "not learning"),
        ({"kl": 0.0}, "F217", "not learning"),
        ({"learning_rate": 0.0}, "F213", "not learning"),
        ({"kl": float("nan")}, "F218", "broken"),
        ({"completions/clipped_ratio": 1.0}, "F219", "not learning"),
        ({"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}, "F211", "not learning"),
    ],
)
def test_what_only_a_log_shows(changes: dict[str, float], first: str, verdict: str, make: RunMaker) -> None:
    for path in (make.trl(40, changes), make.swift(40, changes)):
        found = report(path)
        assert (codes(found)[0], found.verdict, found.exit_code) == (first, verdict, 3)


def test_a_run_of_ms_swift(make: RunMaker) -> None:
    """The version below the output directory, numbers as text, options of args.json."""
    path = make.swift(40, {"kl": 1e-3}, temperature=0.9, num_generations=8, learning_rate=1e-6)
    found = report(path)
    assert (found.verdict, found.exit_code, codes(found)) == ("healthy", 0, [])
    assert (found.log.source, found.log.total_steps, found.log.last_step) == ("ms-swift", 40, 40)
    assert found.log.options["num_generations"] == 8
    assert found.log.records[0].metrics["grad_norm"].value == 0.7
    assert "elapsed_time" not in found.log.records[0].metrics


def test_one_completion_a_prompt_at_temperature_zero(make: RunMaker) -> None:
    """The command of ms-swift#3114: three causes, none of which it reported."""
    flat = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
    found = report(make.swift(20, flat, temperature=0, num_generations=1))
    assert codes(found) == ["E201", "E110", "F211"]
    assert found.verdict == "not learning"


def test_a_swift_run_that_ended_early(make: RunMaker) -> None:
    path = make.swift(40)
    log = path / "v0-20250101-120000" / "logging.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:20]))
    found = report(log)
    assert (found.verdict, found.exit_code) == ("unfinished", 3)
    assert "step 20 of 40" in found.summary


def test_without_a_kl_term_a_kl_of_zero_is_no_sign(make: RunMaker) -> None:
    assert codes(report(make.swift(40, {"kl": 0.0}, beta=0.0))) == []


@pytest.mark.parametrize("kind", ["trl", "swift"])
@pytest.mark.parametrize("is_old", [False, True])
def test_right_answers_that_were_never_rewarded(kind: str, is_old: bool, make: RunMaker) -> None:
    """Logs do not say how many completions a value saw; older ones have no deviation of a reward, and its
    mean under its name alone."""
    end = "" if is_old else "/mean"
    changes = {
        f"rewards/MathAccuracy{end}": 0.0,
        f"rewards/Other{end}": lambda s: 0.5 + 0.04 * math.sin(s * 2.4),
        "reward": lambda s: 0.2 + s / 100,
    }
    if not is_old:
        changes |= {"rewards/MathAccuracy/std": 0.0, "rewards/Other/std": 0.5}
    found = report(make.trl(40, changes) if kind == "trl" else make.swift(40, changes))
    assert (found.verdict, found.exit_code, codes(found)) == ("not learning", 3, ["F226"])
    assert "MathAccuracy is 0 in all 40 records" in found.summary
    few = make.root / "few"
    few.mkdir()
    assert report(RunMaker(few).trl(8, changes)).exit_code == 0


def test_advice_on_a_foreign_run_names_its_checkpoints(make: RunMaker) -> None:
    """Checkpoints of steps 20 and 40, and a breakdown behind step 30."""
    changes = {
        "reward": lambda s: 0.5 + 0.04 * math.sin(s * 2.4) if s <= 30 else 0.0,
        "completions/clipped_ratio": lambda s: 0.02 if s <= 30 else 1.0,
    }
    path = make.trl(80, changes)
    for name in ("checkpoint-20",):
        (path / name).mkdir()
        (path / name / "trainer_state.json").write_text("{}")
    finding = next(s.finding for s in report(path).sightings if s.finding.code == "F221")
    (fix,) = [f for f in finding.fixes if "resume_from_checkpoint" in f.edits]
    assert fix.edits == {"resume_from_checkpoint": str(path / "checkpoint-20")}
