"""What completions say of a run is said while it trains, and the doctor says the same of its files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from covey.config.resolve import from_dict
from covey.doctor.completions import examine as examine_files
from covey.doctor.examine import examine
from covey.doctor.read import read_run
from covey.training.run import train
from covey.types import Metric
from support.runs import options, write_rollouts

NAMES = ("completions/repetitive_ratio", "completions/identical_groups")
# Two prompts are too few for these.
EMPTY = ("completions/most_common_ratio", "completions/reward_length_correlation")


def replayed(directory: Path, change: Any) -> Path:
    """Five rollouts whose completions are changed, record by record."""
    write_rollouts(directory)
    for number, path in enumerate(sorted(directory.iterdir())):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            change(number, record)
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def set_ids(record: dict[str, Any], ids: list[int]) -> None:
    count = len(ids)
    record["completion_ids"], record["trained_mask"] = ids, [1] * count
    record["sampler_logprobs"], record["versions"] = [-1.0] * count, [record["rollout"]] * count
    record["sources"] = [["model", count, 1, count]]


def findings(run: Path) -> list[tuple[str, int]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(e["code"], e["step"]) for e in events if e["kind"] == "finding"]


def test_repetition_is_said_at_its_step(tmp_path: Path, capsys: Any) -> None:
    """Four of eight completions loop from the third rollout on; twice as many would be news, the same are
    not."""

    def loops(number: int, record: dict[str, Any]) -> None:
        if number >= 2 and record["group"] == 1:
            set_ids(record, [5, 6, 7, record["sibling"]] * 8)

    replay = replayed(tmp_path / "rollouts", loops)
    run = tmp_path / "run"
    resolved = from_dict(options(Path("quickstart"), run, replay, save_steps=5), 1)
    assert train(resolved).step == 5
    # One of the replayed rewards failed, which is one of eight in each rollout.
    assert findings(run) == [("F107", 0), ("F206", 3), ("F228", 3)]
    said = capsys.readouterr().out
    assert "F206" in said and "50% of 8 completions repeat one token or one phrase" in " ".join(said.split())
    assert "F206 in 3 steps" in said
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    event = next(e for e in events if e.get("code") == "F206")
    assert event["fixes"][0] == {"text": "use a third of the learning rate", "edits": {"learning_rate": 3e-4}}
    report = examine(read_run(run), 0.0)
    assert [(s.finding.code, s.finding.step, s.num_records) for s in report.sightings] == [
        ("F206", 3, 3),
        ("F228", 3, 3),
        ("F107", 0, 0),
    ]


def test_files_and_run_say_the_same(tmp_path: Path) -> None:
    """Siblings of one group are the same, and two groups are too few to say so at once. Without its own
    numbers, as of an older version, the run's files give the same ones."""

    def same(number: int, record: dict[str, Any]) -> None:
        set_ids(record, [7] * 40 if record["group"] == 1 and number == 3 else [number, record["group"], 9])

    replay = replayed(tmp_path / "rollouts", same)
    run = tmp_path / "run"
    train(from_dict(options(Path("quickstart"), run, replay, save_steps=5), 1))
    assert "F212" not in dict(findings(run))
    log = read_run(run)
    recorded = {r.rollout: {n: r.metrics[n] for n in NAMES} for r in log.records}
    assert recorded[3] == {NAMES[0]: Metric(value=0.5, count=8), NAMES[1]: Metric(value=1.0, count=2)}
    notes: list[str] = []
    assert examine_files(run / "rollouts", notes) == recorded and notes == []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    older = [{k: v for k, v in line.items() if k not in NAMES + EMPTY} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    assert read_run(run).records == log.records
    # What the log says counts, and files are not needed then.
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run / "rollouts").iterdir():
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(b"torn"))
        path.unlink()
    assert read_run(run).records == log.records and read_run(run).notes == []
