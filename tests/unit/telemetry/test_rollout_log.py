from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from covey.errors import CoveyError
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog, RolloutPolicy
from covey.telemetry.rollouts import read_rollouts, rollout_files

LINE = [{"text": "x" * 88}]
NUM_BYTES = 101


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def log_of(directory: Path, max_bytes: float | None = None, **changes: Any) -> RolloutLog:
    """A log that compresses nothing."""
    max_gb = None if max_bytes is None else max_bytes / 1e9
    limits = RolloutLimits(compress_after=changes.pop("compress_after", None), max_gb=max_gb)
    return RolloutLog(directory, limits, **changes)


def delete_oldest(*logs: RolloutLog) -> list[str]:
    """What ranks delete that agree on what is too old."""
    oldest = max(log.oldest_kept() for log in logs)
    return [path.name for log in logs for path in log.delete_before(oldest)]


def test_a_rollout_comes_back_exactly(tmp_path: Path) -> None:
    records = [{"ids": [1, 2], "logprobs": [-0.1, -1 / 3], "text": "4\n2"}, {"ids": [], "advantage": None}]
    path = RolloutLog(tmp_path).write(12, iter(records))
    assert path == tmp_path / "rollout-000012.jsonl"
    assert list(read_rollouts(tmp_path)) == [(12, records)]
    assert names(tmp_path) == ["rollout-000012.jsonl"]


def test_each_rank_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """One of them has no records."""
    whole = [{"group": group, "sibling": sibling} for group in range(3) for sibling in range(2)]
    for rank, own in enumerate((whole[:4], whole[4:], [])):
        RolloutLog(tmp_path, rank=rank, world=3).write(7, own)
    assert names(tmp_path) == [f"rollout-000007.{rank}-of-3.jsonl" for rank in range(3)]
    assert list(read_rollouts(tmp_path)) == [(7, whole)]


def test_a_rollout_stands_once_also_when_compressed(tmp_path: Path) -> None:
    log_of(tmp_path, compress_after=0).write(0, [])
    with pytest.raises(CoveyError, match="already holds rollout 0"):
        RolloutLog(tmp_path).write(0, [])


def test_a_record_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CoveyError):
        RolloutLog(tmp_path).write(0, [{"a": 1}, {"b": object()}])
    assert names(tmp_path) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_directory_that_was_deleted_is_not_made_again(is_first: bool, tmp_path: Path) -> None:
    """The run directory before the first rollout, or that of the rollouts after it."""
    directory = tmp_path / "run" / "rollouts"
    log = RolloutLog(directory, rank=1, world=2)
    if not is_first:
        directory.parent.mkdir()
        log.write(0, LINE).unlink()
        directory.rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        log.write(1, LINE)
    assert raised.value.filename == str(directory) and not directory.exists()


@pytest.mark.parametrize(
    ("policy", "kept"), [("all", [0, 1, 2, 3, 4, 5, 6]), ("none", []), (3, [0, 3, 6]), (1, list(range(7)))]
)
def test_the_policy_decides_what_is_written(policy: RolloutPolicy, kept: list[int]) -> None:
    limits = RolloutLimits(log=policy)
    assert [rollout for rollout in range(7) if limits.includes(rollout)] == kept


@pytest.mark.parametrize(("world", "part"), [(1, ""), (2, ".1-of-2")])
def test_older_files_are_compressed_and_read_in_order(world: int, part: str, tmp_path: Path) -> None:
    for rank in range(world):
        log = log_of(tmp_path, compress_after=2, rank=rank, world=world)
        for rollout in range(5):
            log.write(rollout, [{"rollout": rollout, "text": "é", "group": rank, "sibling": 0}])
    assert [name for name in names(tmp_path) if part in name] == [
        f"rollout-000000{part}.jsonl.gz",
        f"rollout-000001{part}.jsonl.gz",
        f"rollout-000002{part}.jsonl.gz",
        f"rollout-000003{part}.jsonl",
        f"rollout-000004{part}.jsonl",
    ]
    found = list(read_rollouts(tmp_path))
    assert [[(r["rollout"], r["text"], r["group"]) for r in records] for _, records in found] == [
        [(rollout, "é", rank) for rank in range(world)] for rollout in range(5)
    ]


def test_a_compressed_twin_is_written_anew(tmp_path: Path) -> None:
    """A kill between the compressing of a file and its removal leaves both."""
    RolloutLog(tmp_path).write(0, [{"a": 1}])
    (tmp_path / "rollout-000000.jsonl.gz").write_bytes(gzip.compress(b"half of a fi"))
    (tmp_path / ".tmp-rollout-000001.jsonl").write_text("{}\n")
    log_of(tmp_path, compress_after=1).write(2, [])
    assert names(tmp_path) == [
        ".tmp-rollout-000001.jsonl",
        "rollout-000000.jsonl.gz",
        "rollout-000002.jsonl",
    ]
    assert list(read_rollouts(tmp_path)) == [(0, [{"a": 1}]), (2, [])]


def test_the_oldest_go_first_and_the_newest_never(tmp_path: Path) -> None:
    for rollout in range(4):
        RolloutLog(tmp_path).write(rollout, LINE)
    assert delete_oldest(log_of(tmp_path, None)) == delete_oldest(log_of(tmp_path, 4 * NUM_BYTES)) == []
    assert delete_oldest(log_of(tmp_path, 4 * NUM_BYTES - 1)) == ["rollout-000000.jsonl"]
    assert len(delete_oldest(log_of(tmp_path, 0.0))) == 2
    assert names(tmp_path) == ["rollout-000003.jsonl"]


def test_ranks_delete_the_same_rollouts(tmp_path: Path) -> None:
    """Each has half of the limit; the second writes twice as much."""
    limit = 2 * 4 * NUM_BYTES
    logs = [log_of(tmp_path, limit, rank=rank, world=2) for rank in range(2)]
    for rollout in range(4):
        for rank, log in enumerate(logs):
            log.write(rollout, LINE * (1 + rank))
        delete_oldest(*logs)
    assert names(tmp_path) == [f"rollout-00000{n}.{rank}-of-2.jsonl" for n in (2, 3) for rank in range(2)]


def test_files_of_another_number_of_ranks_are_looked_after_once(tmp_path: Path) -> None:
    for rank in range(3):
        RolloutLog(tmp_path, rank=rank, world=3).write(0, LINE)
    RolloutLog(tmp_path).write(1, LINE)
    logs = [log_of(tmp_path, 2 * NUM_BYTES, compress_after=1, rank=rank, world=2) for rank in range(2)]
    for log in logs:
        log.write(2, LINE)
    assert [file.is_compressed for file in rollout_files(tmp_path)] == [True] * 4 + [False] * 2
    assert sorted(delete_oldest(*logs)) == [
        *(f"rollout-000000.{rank}-of-3.jsonl.gz" for rank in range(3)),
        "rollout-000001.jsonl.gz",
    ]


def test_a_run_lists_its_rollouts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rollout in range(8):
        RolloutLog(tmp_path).write(rollout, LINE)
    listings = []
    monkeypatch.setattr(
        "covey.telemetry.rollout_log.rollout_files", lambda d: listings.append(d) or rollout_files(d)
    )
    log = log_of(tmp_path, 8 * NUM_BYTES, compress_after=20)
    for rollout in range(8, 15):
        log.write(rollout, LINE)
        assert delete_oldest(log) == [f"rollout-00000{rollout - 8}.jsonl"]
    assert listings == [tmp_path]
    assert len(names(tmp_path)) == 8


def test_files_that_somebody_took_away_are_not_missed(tmp_path: Path) -> None:
    log = log_of(tmp_path, 0.0, compress_after=3)
    for rollout in range(3):
        log.write(rollout, LINE)
    (tmp_path / "rollout-000000.jsonl").unlink()
    log.write(3, LINE)
    log.write(4, LINE)
    assert names(tmp_path)[0] == "rollout-000001.jsonl.gz"
    assert delete_oldest(log) == [
        "rollout-000001.jsonl.gz",
        "rollout-000002.jsonl",
        "rollout-000003.jsonl",
    ]
