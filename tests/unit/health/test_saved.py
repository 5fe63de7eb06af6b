"""Advice names a checkpoint that is there, from before the fault, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.health.rules import Rules
from covey.health.saved import BACK, MENDED, NEWEST, Saved, checkpoints_of, possible
from covey.types import Finding, Fix, Metric, StepRecord

SLOWER = Fix(text="use a third of the learning rate", edits={"learning_rate": 1e-6})


def saved(step: int, **fields: Any) -> Saved:
    return Saved(step=step, path=Path(f"runs/a/checkpoint-{step}"), **{"resumes": True, **fields})


def test_the_newest_checkpoint_from_before() -> None:
    (fix,) = possible((BACK,), [saved(10), saved(20), saved(30)], 30, SLOWER)
    assert dict(fix.edits) == {
        "resume_from_checkpoint": "runs/a/checkpoint-20",
        "learning_rate": 1e-6,
        "allow_changes": True,
    }
    assert "checkpoint-20" in fix.text


def test_one_that_was_reduced_to_its_model_is_where_a_new_run_starts() -> None:
    (fix,) = possible((BACK,), [saved(20, resumes=False), saved(30)], 30, SLOWER)
    assert dict(fix.edits) == {"model": "runs/a/checkpoint-20", "learning_rate": 1e-6}


def test_another_tool_has_no_option_for_changes() -> None:
    (fix,) = possible((BACK,), [saved(20, is_ours=False)], 30, SLOWER)
    assert dict(fix.edits) == {"resume_from_checkpoint": "runs/a/checkpoint-20", "learning_rate": 1e-6}
    (fix,) = possible((BACK,), [saved(20)], 30, Fix(text="slower"))
    assert dict(fix.edits) == {"resume_from_checkpoint": "runs/a/checkpoint-20"}


@pytest.mark.parametrize("checkpoints", [[], [saved(30), saved(40)]])
def test_none_from_before(checkpoints: list[Saved]) -> None:
    (fix,) = possible((BACK,), checkpoints, 30, SLOWER)
    assert not fix.edits and "checkpoint-" not in fix.text and "--resume" not in fix.text


def test_what_a_guard_advises_without_a_checkpoint() -> None:
    other = Fix(text="return None for it")
    kept = possible((other, MENDED, NEWEST), [saved(4)], 5, SLOWER)
    assert kept == (other, MENDED, NEWEST)
    for checkpoints in ([], [saved(4, resumes=False)]):
        first, *rest = possible((other, MENDED, NEWEST), checkpoints, 5, SLOWER)
        assert first == other
        assert not any("resume" in fix.text and "no checkpoint" not in fix.text for fix in rest)


def test_checkpoints_of_a_directory(tmp_path: Path) -> None:
    assert checkpoints_of(tmp_path / "absent") == []
    for step, whole in ((20, True), (3, True), (30, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoint-20" / "trainer").mkdir()
    found = [(s.step, s.resumes) for s in checkpoints_of(tmp_path)]
    assert found == [(3, False), (20, True)]


def broken_after(step: int, last: int, checkpoints: list[Saved]) -> dict[str, Finding]:
    """A run that breaks down at a step: the reward is gone, all completions are cut and repeat themselves."""
    rules = Rules({"learning_rate": 3e-6}, saved=lambda: checkpoints)
    found: dict[str, Finding] = {}
    for now in range(1, last + 1):
        is_bad = now > step
        values = {"reward": 0.0 if is_bad else 0.5, "rewards/accuracy/mean": 0.0 if is_bad else 0.5}
        values |= {"rewards/accuracy/std": 0.0 if is_bad else 0.5}
        values |= {"completions/clipped_ratio": float(is_bad), "completions/repetitive_ratio": float(is_bad)}
        metrics = {n: Metric(value=v, count=64) for n, v in values.items()}
        metrics["reward_std"] = Metric(value=0.0 if is_bad else 0.4, count=8)
        for f in rules.check(StepRecord(step=now, rollout=now, pass_index=0, metrics=metrics)):
            found.setdefault(f.code, f)
    return found


def test_the_advice_of_a_breakdown_is_from_before_the_fall_and_not_before_it_was_seen() -> None:
    """The rollout of step 21 is bad, so the weights of step 20 are; F221 is said steps later."""
    checkpoints = [saved(step) for step in (5, 10, 15, 19, 20, 21, 22, 23)]
    found = broken_after(20, 40, checkpoints)
    assert found["F221"].step and found["F221"].step > 22
    for code in ("F206", "F221"):
        places = [fix.edits.get("resume_from_checkpoint") for fix in found[code].fixes]
        assert places[-1] == "runs/a/checkpoint-19", code


def test_the_advice_of_a_breakdown_without_checkpoints() -> None:
    for found in (broken_after(20, 40, []), broken_after(20, 40, [saved(20), saved(40)])):
        for code in ("F206", "F221"):
            assert not any("resume_from_checkpoint" in fix.edits for fix in found[code].fixes)
            assert not any("--resume" in fix.text for fix in found[code].fixes)
            assert any("no checkpoint from before" in fix.text for fix in found[code].fixes)


def test_the_best_evaluation_is_named_where_it_was_saved() -> None:
    def falls(checkpoints: list[Saved]) -> Finding:
        rules = Rules({}, saved=lambda: checkpoints)
        best = {20: 0.4, 40: 0.8}
        for step in range(1, 121):
            metrics = {"reward": Metric(value=0.4 + 0.003 * step, count=64)}
            if step % 20 == 0:
                metrics["eval_reward"] = Metric(value=best.get(step, 0.5), count=64)
            found = rules.check(StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics))
            if found:
                return found[0]
        raise AssertionError

    there, gone = falls([saved(40), saved(100)]), falls([saved(100)])
    assert there.code == gone.code == "F208"
    assert "runs/a/checkpoint-40" in there.fixes[0].text
    assert "checkpoint-" not in gone.fixes[0].text
