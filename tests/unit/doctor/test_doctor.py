"""The verdict of the doctor on runs of covey: what it says, with which exit code, and that it only reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.doctor.examine import Report, examine
from covey.doctor.read import read_run
from covey.doctor.verdicts import BY_CODE, MEANINGS, ORDER
from covey.health.record import fields_of
from covey.health.saved import BACK, MENDED
from covey.plan.words import WIDTH
from covey.telemetry.rollout_log import RolloutLog
from covey.types import Finding, Fix
from support.doctor_page import PAGE, rendered, unnamed

from .conftest import RunMaker

LATER = 10**10


def report(path: Path, now: float = LATER) -> Report:
    return examine(read_run(path), now)


def codes(found: Report) -> list[str]:
    return [s.finding.code for s in found.sightings]


def text(found: Report, label: str) -> str:
    return "; ".join(text for name, text in found.evidence if name == label)


def test_a_healthy_run(make: RunMaker) -> None:
    found = report(make.covey(60, saved=(60,)))
    assert (found.verdict, found.exit_code, codes(found)) == ("healthy", 0, [])
    assert found.summary.startswith("nothing unusual in 60 records; the mean reward neither rises nor falls")
    assert "60 of 60 optimizer steps" in text(found, "run")
    assert text(found, "saved") == "checkpoints of step 60"


def test_a_short_run_is_not_called_healthy_while_its_completions_are_cut_and_its_rewards_equal(
    make: RunMaker,
) -> None:
    cut = {"completions/clipped_ratio": 1.0}
    flat = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "reward": 0.0}
    found = report(make.covey(2, {**cut, **flat}))
    assert (found.verdict, found.exit_code, codes(found)) == ("unclear", 0, [])
    assert found.summary == (
        "nothing is wrong by the rules after 2 records, but 100% of the newest completions are truncated "
        "and all completions of each prompt got the same reward so far"
    )


def test_one_rollout_without_signal_is_usual(make: RunMaker) -> None:
    found = report(make.covey(5, {"frac_reward_zero_std": lambda s: float(s == 5)}))
    assert found.verdict == "healthy"
    assert found.summary == "nothing unusual in 5 records, which are too few to say whether the reward rises"


def test_what_is_truncated_while_the_reward_rises_is_no_doubt(make: RunMaker) -> None:
    rising = {"completions/clipped_ratio": 0.6, "reward": lambda s: 0.2 + s / 100}
    assert report(make.covey(60, rising)).verdict == "learning"


def test_a_run_that_learns(make: RunMaker) -> None:
    found = report(make.covey(60, {"reward": lambda s: 0.2 + s / 100}))
    assert (found.verdict, found.exit_code) == ("learning", 0)
    # Of 60 steps the first 15 have a mean step of 8, the last of 53.
    assert "0.28 -> 0.73" in found.summary


def test_a_reward_that_falls(make: RunMaker) -> None:
    found = report(make.covey(60, {"reward": lambda s: 0.9 - s / 100}))
    assert (found.verdict, found.exit_code, codes(found)) == ("getting worse", 3, ["F222"])


def test_a_run_without_signal(make: RunMaker) -> None:
    path = make.covey(30, {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "reward": 0.0, "grad_norm": 0.0})
    found = report(path)
    assert (found.verdict, found.exit_code, codes(found)) == ("not learning", 3, ["F211"])
    assert found.sightings[0].finding.step == 3 and found.sightings[0].num_records == 28


def test_options_come_first_among_the_causes(make: RunMaker) -> None:
    flat = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "grad_norm": 0.0}
    options = {"temperature": 0.0, "num_generations": 1, "learning_rate": 0.0}
    found = report(make.covey(30, flat, options=options))
    assert codes(found) == ["E201", "E110", "W103", "F211"]
    assert dict(found.sightings[1].finding.fixes[0].edits) == {"temperature": 1.0}
    assert found.verdict == "not learning"


def test_one_completion_of_a_prompt_is_enough_for_an_estimator_over_the_rollout(make: RunMaker) -> None:
    healthy = {"frac_reward_zero_std": 0.0, "reward_std": 0.4, "grad_norm": 1.0}
    options = {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus"}
    assert "E201" not in codes(report(make.covey(30, healthy, options=options)))


def test_top_k_of_1_is_greedy_whatever_the_temperature(make: RunMaker) -> None:
    flat = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "grad_norm": 0.0}
    found = report(make.covey(30, flat, options={"temperature": 1.0, "top_k": 1}))
    assert codes(found) == ["E110", "F211"]
    assert dict(found.sightings[0].finding.fixes[0].edits) == {"top_k": 0}


def test_a_sign_that_is_over_is_told_and_no_more(make: RunMaker) -> None:
    found = report(make.covey(60, {"grad_norm": lambda s: 50.0 if 30 <= s < 34 else 0.7}))
    assert (found.verdict, found.exit_code, codes(found)) == ("healthy", 0, ["F210"])
    assert not found.sightings[0].holds and found.sightings[0].num_records == 2


def test_a_guard(make: RunMaker) -> None:
    guard = ("finding", 12, {"code": "F101", "seen": "step 13: loss is nan"})
    goes_on = ("finding", 1, {"code": "F108", "seen": "format is 0 for all 64 completions"})
    path = make.covey(12, total=40, saved=(12,), events=(goes_on, guard))
    found = report(path)
    assert (found.verdict, found.exit_code) == ("stopped by guard F101", 3)
    assert codes(found) == ["F101", "F108"]
    assert "loss is nan" in found.sightings[0].finding.seen
    # The run was resumed and went beyond: the guard is history.
    (path / "metrics.jsonl").write_text(
        (path / "metrics.jsonl").read_text().replace('"step": 12,', '"step": 14,')
    )
    assert report(path).verdict != "stopped by guard F101"


def test_a_guards_warning_stops_nothing(make: RunMaker) -> None:
    """F107 of a few rows, in the newest rollout: the run goes on."""
    warned = {"code": "F107", "severity": "warning", "seen": "the reward judge failed on 1 of 8 completions"}
    path = make.covey(12, total=40, events=(("finding", 12, warned),))
    now = path.joinpath("metrics.jsonl").stat().st_mtime + 1
    found = report(path, now)
    assert (found.exit_code, codes(found)) == (0, ["F107"])
    events = path / "events.jsonl"
    events.write_text(events.read_text().replace('"warning"', '"error"'))
    found = report(path, now)
    assert (found.verdict, found.exit_code) == ("stopped by guard F107", 3)


def test_what_a_guard_advised_is_advised_again(make: RunMaker, capsys: pytest.CaptureFixture[str]) -> None:
    """The fixes of the record, with their flags; a record without any, or with damaged ones, has the code's
    page."""
    fixes = (Fix(text="a smaller learning rate"), Fix(text="float32", edits={"torch_dtype": "float32"}))
    finding = Finding(code="F101", seen="step 13: loss is nan", why="", cause="Overflow.", fixes=fixes)
    path = make.covey(12, total=40, events=(("finding", 12, fields_of(finding)),))
    assert report(path).sightings[0].finding.fixes == fixes
    assert main(["doctor", str(path)]) == 3
    assert "--torch_dtype float32" in capsys.readouterr().out
    events = path / "events.jsonl"
    whole = json.loads(events.read_text())
    explain = (Fix(text="`covey explain F101`"),)
    for kept, expected in (
        (None, explain),
        ("float32", explain),
        ([{"edits": {}}, 7, {"text": "float32", "edits": 3}], explain),
        ([{"text": "a smaller learning rate"}], fixes[:1]),
    ):
        events.write_text(json.dumps({**whole, "fixes": kept}) + "\n")
        assert report(path).sightings[0].finding.fixes == expected
    events.write_text(json.dumps({"kind": "finding", "step": 12, "code": "F101", "seen": "x"}) + "\n")
    assert report(path).sightings[0].finding.fixes == explain


def test_a_hang(make: RunMaker) -> None:
    hang = ("finding", 12, {"code": "F301", "seen": "rank 1 waits"})
    found = report(make.covey(12, total=40, events=(hang,)))
    assert (found.verdict, found.exit_code) == ("hung", 3)


def test_runs_that_are_not_at_their_end(make: RunMaker) -> None:
    path = make.covey(12, total=40, saved=(10,))
    found = report(path)
    assert (found.verdict, found.exit_code) == ("unfinished", 3)
    assert "step 12 of 40" in found.summary and "checkpoint is of step 10" in found.summary
    written = max(p.stat().st_mtime for p in path.iterdir())
    assert report(path, written + 5).exit_code == 0
    make.checkpoint(path, 12)
    assert (report(path).verdict, report(path).exit_code) == ("interrupted", 0)


def test_no_step_at_all(make: RunMaker) -> None:
    found = report(make.covey(0, total=40))
    assert (found.verdict, found.exit_code) == ("unfinished", 3)
    assert "metrics.jsonl is missing" in text(found, "note")


def test_torn_and_missing_files_are_said(make: RunMaker) -> None:
    """A directory that was copied while a run wrote to it, and in part."""
    saved = tuple(("saved", s, {"path": f"checkpoint-{s}"}) for s in (10, 20, 30))
    path = make.covey(30, saved=(10, 20), events=saved)
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:4], "garbage\n", *lines[5:-1], lines[-1][:30]]))
    (path / "checkpoint-20" / "model.safetensors").write_bytes(b"0" * 40)
    (path / "plan.json").unlink()
    found = report(path)
    notes = text(found, "note")
    assert found.log.saved == [10]
    for words in (
        "metrics.jsonl: 2 lines are not valid JSON and skipped; the last one is cut short",
        "steps are missing at 1 places",
        "checkpoint-20 is incomplete: model.safetensors",
        "checkpoint-30 was saved but is no longer here",
        "plan.json is missing",
        "no rollouts were recorded",
    ):
        assert words in notes
    assert found.exit_code == 0


def completion(group: int, ids: list[int], parsed_by: str = "box") -> dict[str, Any]:
    return {
        "group": group,
        "completion_ids": ids,
        "trained_mask": [1] * len(ids),
        "extras": {"parsed_by": parsed_by},
    }


def test_completions_are_looked_at(make: RunMaker) -> None:
    """Half of a compressed rollout repeats one token, and no answer of it can be read."""
    path = make.covey(12)
    log = RolloutLog(path / "rollouts")
    for rollout in range(12):
        good = [completion(i % 4, [*range(i, i + 40)], "none") for i in range(8)]
        log.write(rollout, [*good, *(completion(9, [7] * 40, "none") for _ in range(8))])
    assert (path / "rollouts" / "rollout-000000.jsonl.gz").is_file()
    (path / "rollouts" / "rollout-000001.jsonl.gz").write_bytes(b"\x1f\x8bxx")
    found = report(path)
    assert found.verdict == "broken" and codes(found) == ["F206"]
    assert "50% of 16 completions" in found.sightings[0].finding.seen
    newest = "100% without a readable answer, all completions are the same in 20% of the groups"
    assert newest in text(found, "newest")
    assert "rollout-000001.jsonl.gz cannot be read" in text(found, "note")


def test_a_newest_rollout_may_be_unfinished(make: RunMaker) -> None:
    """Two ranks: of the newest rollout one has not written its file; of another a file was deleted."""
    path = make.covey(6)
    logs = [RolloutLog(path / "rollouts", rank=rank, world=2) for rank in range(2)]
    for rollout in range(6):
        for rank, log in enumerate(logs[: 1 if rollout == 5 else 2]):
            records = [{**completion(rank, [*range(i, i + 40)]), "sibling": i} for i in range(4)]
            log.write(rollout, records)
    found = report(path)
    assert "rollout" not in text(found, "note")
    assert "all completions are the same" in text(found, "newest")
    (path / "rollouts" / "rollout-000002.1-of-2.jsonl").unlink()
    assert "rollout-000002.1-of-2.jsonl" in text(report(path), "note")


def test_the_command(make: RunMaker, capsys: pytest.CaptureFixture[str]) -> None:
    path = make.covey(40, {"frac_reward_zero_std": 1.0})
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*")}
    assert main(["doctor", str(path)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verdict   not learning: no group has a signal (F211)")
    assert "F211 at step 3 (warning)" in lines
    assert max(len(line) for line in lines if str(path) not in line) <= WIDTH
    assert main(["doctor", str(path), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["exit_code"], said["run"]["step"]) == ("not learning", 3, 40)
    assert [f["code"] for f in said["findings"]] == ["F211"]
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["absent"], "E408"),
        (["."], "E408"),
        (["damaged/trainer_state.json"], "E408"),
        (["empty/trainer_state.json"], "E409"),
        (["a", "b"], "E108"),
        (["--steps", "a"], "E101"),
        (["--json"], "E105"),
        (["--live", "a"], "E103"),
        (["--live", "1", "a"], "E108"),
        (["--live", "1", "--json"], "E108"),
    ],
)
def test_what_is_no_run(
    words: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("damaged", "{"), ("empty", '{"log_history": []}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(content)
    assert main(["doctor", *words]) == 2
    assert code in capsys.readouterr().err


PARTS = {"rewards/evens/mean": 0.5, "rewards/evens/std": 0.5}
NEVER = {"rewards/accuracy/mean": 0.0, "rewards/accuracy/std": 0.0}


def test_right_answers_that_were_never_rewarded_are_not_learned(make: RunMaker) -> None:
    """Although the total rises: only the other reward moves."""
    rises = {"reward": lambda s: 0.2 + s / 100}
    found = report(make.covey(60, {**NEVER, **PARTS, **rises}))
    assert (found.verdict, found.exit_code, codes(found)) == ("not learning", 3, ["F226"])
    assert "accuracy is 0 for all 480 completions of 60 rollouts" in found.summary
    assert "accuracy is 0" in text(found, "constant")


@pytest.mark.parametrize(
    ("name", "value"), [("format", 1.0), ("soft_overlong", 0.0), ("length_penalty", 0.0), ("accuracy", 1.0)]
)
def test_a_reward_at_its_best_is_well(name: str, value: float, make: RunMaker) -> None:
    same = {f"rewards/{name}/mean": value, f"rewards/{name}/std": 0.0}
    rises = {"reward": lambda s: 0.2 + s / 100}
    found = report(make.covey(60, {**same, **PARTS, **rises}))
    assert (found.verdict, found.exit_code, codes(found)) == ("learning", 0, [])
    assert f"{name} is {value:g}" in text(found, "constant")


def test_a_reward_of_an_unknown_kind_that_never_varies(make: RunMaker) -> None:
    """Above 0 it is named in the verdict's line; at 0 it may be one that nobody earns."""
    rises = {"reward": lambda s: 0.2 + s / 100}
    half = {"rewards/mine/mean": 0.5, "rewards/mine/std": 0.0}
    found = report(make.covey(60, {**half, **PARTS, **rises}))
    assert (found.verdict, found.exit_code, codes(found)) == ("learning", 0, ["F227"])
    assert "mine is 0.5 for all" in found.summary


def test_a_reward_of_an_unknown_kind_at_zero(make: RunMaker) -> None:
    zero = {"rewards/mine/mean": 0.0, "rewards/mine/std": 0.0}
    rises = {"reward": lambda s: 0.2 + s / 100}
    found = report(make.covey(60, {**zero, **PARTS, **rises}))
    assert (found.verdict, found.exit_code) == ("unclear", 0)
    assert "mine is 0 for all" in found.summary and "0.28 -> 0.73" in found.summary


def test_completions_without_a_reward(make: RunMaker) -> None:
    """29 of 64, and the reward rises."""
    found = report(make.covey(40, {"rows/invalid": 3.0, "reward": lambda s: 0.2 + s / 100}))
    assert (found.verdict, found.exit_code, codes(found)) == ("unhealthy", 3, ["F228"])
    assert "38% without a reward" in text(found, "newest")


def test_a_collapse_by_the_learning_rate(make: RunMaker) -> None:
    """Figures of a small model at 300 times the usual learning rate, whose completions are 24 tokens long."""
    changes = {
        "reward": lambda s: {1: 0.03, 2: 0.125, 3: 0.06, 4: 0.125, 5: 0.03}.get(s, 0.0),
        "reward_std": lambda s: 0.1 if s <= 5 else 0.0,
        "frac_reward_zero_std": lambda s: 0.75 if s <= 5 else 1.0,
        "entropy": lambda s: max(0.04, 1.85 * 0.72 ** (s - 1)),
        "completions/mean_length": 24.0,
        "completions/clipped_ratio": 1.0,
        "grad_norm": lambda s: 0.7 if s <= 5 else 0.0,
        "learning_rate": 3e-4,
    }
    found = report(make.covey(22, changes, options={"learning_rate": 3e-4, "num_generations": 8}))
    assert (found.verdict, found.exit_code) == ("collapsed", 3)
    assert codes(found)[0] == "F229"
    for sighting in found.sightings:
        if sighting.finding.code in ("F229", "F211"):
            assert "0.0003" in sighting.finding.cause
            assert dict(sighting.finding.fixes[0].edits) == {"learning_rate": 3e-5}


def test_a_low_sample_size_has_a_verdict(make: RunMaker) -> None:
    found = report(make.covey(20, {"sampling/ess": 0.3}))
    assert (found.verdict, found.exit_code, codes(found)) == ("unhealthy", 3, ["F225"])


def test_every_rule_leads_to_a_verdict_and_every_verdict_has_a_meaning() -> None:
    assert unnamed() == set()
    assert len(set(ORDER)) == len(ORDER)
    assert {str(word) for word, _ in BY_CODE} <= {str(m.word) for m in MEANINGS}


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run, in tests: python -m support.doctor_page"
    assert "F225" in page


def test_advice_names_a_checkpoint_of_the_directory(make: RunMaker) -> None:
    """Completions repeat themselves from step 20 on: checkpoint-10 is from before, checkpoint-30 is not."""
    changes = {"completions/repetitive_ratio": lambda s: 0.5 if s >= 20 else 0.0}
    path = make.covey(40, changes, saved=(10, 30), options={"learning_rate": 3e-6})
    (path / "checkpoint-10" / "trainer").mkdir()
    (path / "checkpoint-30" / "trainer").mkdir()
    (sighting,) = report(path).sightings
    assert sighting.finding.code == "F206"
    (fix,) = [f for f in sighting.finding.fixes if "resume_from_checkpoint" in f.edits]
    assert fix.edits["resume_from_checkpoint"] == str(path / "checkpoint-10")
    for file in (path / "checkpoint-10").iterdir():
        if file.is_file():
            file.unlink()
    (sighting,) = report(path).sightings
    assert not any(
        "resume_from_checkpoint" in f.edits or "--resume" in f.text for f in sighting.finding.fixes
    )


def test_recorded_advice_names_no_checkpoint_that_is_gone(make: RunMaker) -> None:
    gone = Fix(text="resume from checkpoint-5", edits={"resume_from_checkpoint": "run/checkpoint-5"})
    finding = Finding(code="F107", seen="x", why="", cause="", fixes=(MENDED, BACK, gone))
    path = make.covey(12, events=(("finding", 12, fields_of(finding)),))
    (sighting,) = report(path).sightings
    texts = [fix.text for fix in sighting.finding.fixes]
    assert len(texts) == 2 and all("no checkpoint" in t and "--resume" not in t for t in texts)
