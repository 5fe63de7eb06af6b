"""Logs that TRL 1.16 and ms-swift 4.6 wrote, of 12 steps of the built-in task on a CPU.

The healthy runs pay for the right answer, with a KL term and an evaluation every sixth step; in the flat ones
every completion has the reward 0.5. Paths are cut from the logs, and from args.json the options that covey
has no name for; nothing else is changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.doctor.examine import examine
from covey.doctor.read import read_run

LOGS = Path(__file__).parent / "logs"
LATER = 10**10
REWARD = {"trl-1.16.0": "rewards/answer/mean", "ms-swift-4.6.0": "rewards/Bench/mean"}
SOURCE = {"trl-1.16.0": "TRL", "ms-swift-4.6.0": "ms-swift"}


def entries(run: Path) -> list[dict[str, Any]]:
    """The training steps of a log as its tool wrote them, read without covey."""
    (file,) = [*run.glob("v0-*/logging.jsonl"), *run.glob("checkpoint-12/trainer_state.json")]
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        lines = json.loads(file.read_text())["log_history"]
    return [line for line in lines if "reward" in line]


@pytest.mark.parametrize("tool", SOURCE)
@pytest.mark.parametrize("kind", ["healthy", "flat"])
def test_every_step_is_read(tool: str, kind: str) -> None:
    run = LOGS / f"{tool}-{kind}"
    log = read_run(run)
    assert (log.source, log.total_steps) == (SOURCE[tool], 12)
    assert [r.step for r in log.records] == list(range(1, 13))
    names = ("reward", "reward_std", "frac_reward_zero_std", "grad_norm", "learning_rate", "loss")
    names += ("completions/mean_length", "completions/clipped_ratio", *(["kl"] if kind == "healthy" else []))
    for written, record in zip(entries(run), log.records, strict=True):
        assert {n: record.metrics[n].value for n in names} == {n: written[n] for n in names}
        # What the run's end adds to its last step is no metric of that step.
        assert not {"train_runtime", "train_loss", "total_flos"} & record.metrics.keys()
    evaluated = [r.step for r in log.records if "eval_reward" in r.metrics]
    assert evaluated == ([6, 12] if kind == "healthy" else [])
    if tool.startswith("ms-swift"):
        options = [log.options[n] for n in ("num_generations", "learning_rate", "beta", "loss_type")]
        assert options == [8, 1e-4, 0.02 if kind == "healthy" else 0.0, "grpo"]


@pytest.mark.parametrize("tool", SOURCE)
def test_a_healthy_run(tool: str) -> None:
    report = examine(read_run(LOGS / f"{tool}-healthy"), LATER)
    assert (report.verdict, report.exit_code, report.sightings) == ("healthy", 0, [])
    shown = dict(report.evidence)
    assert "12 of 12 optimizer steps" in shown["run"] and "at step 12" in shown["held-out"]
    assert min(r.metrics[REWARD[tool]].value or 0 for r in report.log.records) > 0


@pytest.mark.parametrize("tool", SOURCE)
def test_a_constant_reward(tool: str) -> None:
    """A log does not say how many groups a rollout has, so ten rollouts are waited for."""
    report = examine(read_run(LOGS / f"{tool}-flat"), LATER)
    assert (report.verdict, report.exit_code) == ("not learning", 3)
    assert [(s.finding.code, s.finding.step) for s in report.sightings] == [("F211", 10)]
    assert "has the reward 0.5" in report.sightings[0].finding.cause


def test_a_checkpoint_of_ms_swift_is_not_of_trl() -> None:
    """It holds the trainer's state too, and the options beside it."""
    (version,) = (LOGS / "ms-swift-4.6.0-flat").glob("v0-*")
    whole = read_run(version)
    for path in (version / "checkpoint-12", version / "checkpoint-12" / "trainer_state.json"):
        log = read_run(path)
        assert (log.source, log.total_steps, log.saved) == ("ms-swift", 12, [12])
        assert log.options == whole.options and log.notes == []
        assert [r.metrics["reward"] for r in log.records] == [r.metrics["reward"] for r in whole.records]
