from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from covey.errors import CoveyError
from covey.telemetry.files import RunFiles
from covey.telemetry.rollouts import (
    RolloutLimits,
    RolloutLog,
    RolloutPolicy,
    list_rollouts,
    read_rollouts,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_rollout_comes_back_exactly(tmp_path: Path) -> None:
    records = [{"ids": [1, 2], "logprobs": [-0.1, -1 / 3], "text": "4\n2"}, {"ids": [], "advantage": None}]
    path = RolloutLog(tmp_path).write(12, iter(records))
    assert path == tmp_path / "rollout-000012.jsonl"
    assert list(read_rollouts(tmp_path)) == [(12, records)]
    assert names(tmp_path) == ["rollout-000012.jsonl"]


def test_a_rollout_stands_once_also_when_compressed(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(0, [])
    RolloutLog(tmp_path).compress_old(0)
    with pytest.raises(CoveyError, match="already holds rollout 0"):
        RolloutLog(tmp_path).write(0, [])


def test_a_record_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CoveyError):
        RolloutLog(tmp_path).write(0, [{"a": 1}, {"b": object()}])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("policy", "kept"), [("all", [0, 1, 2, 3, 4, 5, 6]), ("none", []), (3, [0, 3, 6]), (1, list(range(7)))]
)
def test_the_policy_decides_what_is_written(tmp_path: Path, policy: RolloutPolicy, kept: list[int]) -> None:
    files = RunFiles(tmp_path, rollouts=RolloutLimits(log=policy))
    written = [files.append_rollout(rollout, [{"r": rollout}]) is not None for rollout in range(7)]
    assert [rollout for rollout, was_written in enumerate(written) if was_written] == kept
    assert [rollout for rollout, _ in read_rollouts(tmp_path / "rollouts")] == kept


def test_older_files_are_compressed_and_read_in_order(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, rollouts=RolloutLimits(compress_after=2))
    for rollout in range(5):
        files.append_rollout(rollout, [{"rollout": rollout, "text": "é"}])
    directory = tmp_path / "rollouts"
    assert names(directory) == [
        "rollout-000000.jsonl.gz",
        "rollout-000001.jsonl.gz",
        "rollout-000002.jsonl.gz",
        "rollout-000003.jsonl",
        "rollout-000004.jsonl",
    ]
    assert list(read_rollouts(directory)) == [(r, [{"rollout": r, "text": "é"}]) for r in range(5)]


def test_a_file_beside_its_compressed_twin_is_read_once(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(0, [{"a": 1}])
    (tmp_path / "rollout-000000.jsonl.gz").write_bytes(gzip.compress(b"half of a fi"))
    (tmp_path / ".tmp-rollout-000001.jsonl").write_text("{}\n")
    assert list(read_rollouts(tmp_path)) == [(0, [{"a": 1}])]
    RolloutLog(tmp_path).compress_old(0)
    assert names(tmp_path) == [".tmp-rollout-000001.jsonl", "rollout-000000.jsonl.gz"]
    assert list(read_rollouts(tmp_path)) == [(0, [{"a": 1}])]


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(0, [{"a": 1}])
    RolloutLog(tmp_path).compress_old(0)
    path = tmp_path / "rollout-000000.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CoveyError, match=r"rollout-000000\.jsonl\.gz"):
        list(read_rollouts(tmp_path))


def test_the_oldest_go_first_and_the_newest_never(tmp_path: Path) -> None:
    for rollout in range(4):
        RolloutLog(tmp_path).write(rollout, [{"text": "x" * 88}])
    assert RolloutLog(tmp_path).delete_oldest(404 / 1e9) == []
    assert [p.name for p in RolloutLog(tmp_path).delete_oldest(403 / 1e9)] == ["rollout-000000.jsonl"]
    assert len(RolloutLog(tmp_path).delete_oldest(0.0)) == 2
    assert names(tmp_path) == ["rollout-000003.jsonl"]


def test_a_long_run_does_not_list_its_rollouts_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RolloutLog(tmp_path).write(0, [])
    listings = []
    monkeypatch.setattr(
        "covey.telemetry.rollouts.list_rollouts", lambda d: listings.append(d) or list_rollouts(d)
    )
    log = RolloutLog(tmp_path)
    for rollout in range(1, 9):
        log.write(rollout, [])
        log.compress_old(3)
        log.delete_oldest(1.0)
    assert listings == [tmp_path]
    plain = [f"rollout-00000{i}.jsonl" for i in (6, 7, 8)]
    assert names(tmp_path) == [f"rollout-00000{i}.jsonl.gz" for i in range(6)] + plain


def test_a_run_at_its_limit_lists_its_rollouts_once_for_all_that_it_may_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rollout in range(8):
        RolloutLog(tmp_path).write(rollout, [{"text": "x" * 88}])
    listings = []
    monkeypatch.setattr(
        "covey.telemetry.rollouts.list_rollouts", lambda d: listings.append(d) or list_rollouts(d)
    )
    log = RolloutLog(tmp_path)
    for rollout in range(8, 15):
        log.write(rollout, [{"text": "x" * 88}])
        assert [p.name for p in log.delete_oldest(8 * 101 / 1e9)] == [f"rollout-00000{rollout - 8}.jsonl"]
    assert len(listings) == 2
    assert len(names(tmp_path)) == 8


def test_files_that_somebody_took_away_are_not_missed(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    for rollout in range(4):
        log.write(rollout, [{"text": "x" * 88}])
    (tmp_path / "rollout-000000.jsonl").unlink()
    log.compress_old(2)
    assert names(tmp_path)[0] == "rollout-000001.jsonl.gz"
    assert [p.name for p in log.delete_oldest(0.0)] == ["rollout-000001.jsonl.gz", "rollout-000002.jsonl"]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(0, [{"a": 1}])
    program = (
        "import sys; from pathlib import Path; from covey.telemetry.files import read_rollouts\n"
        "import covey.telemetry.plot, covey.telemetry.console\n"
        "assert len(list(read_rollouts(Path(sys.argv[1])))) == 1\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0
