from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.errors import CoveyError
from covey.telemetry.rollout_log import RolloutLimits, RolloutLog
from covey.telemetry.rollouts import list_rollouts, read_rollout, read_rollouts, rollout_path

WHOLE = [{"group": g, "sibling": s, "text": f"{g}, {s}"} for g in range(4) for s in range(3)]


def write(directory: Path, rollout: int, world: int, *ranks: int, compressed: bool = False) -> None:
    """What these of `world` ranks write of WHOLE."""
    limits = RolloutLimits(compress_after=0 if compressed else None)
    share = -(-len(WHOLE) // world)
    for rank in ranks or range(world):
        own = WHOLE[rank * share : (rank + 1) * share]
        RolloutLog(directory, limits, rank=rank, world=world).write(rollout, own)


def numbers(directory: Path, **kwargs: Any) -> list[int]:
    return [rollout for rollout, _ in read_rollouts(directory, **kwargs)]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5, 12])
def test_ranks_write_what_one_would(world: int, compressed: bool, tmp_path: Path) -> None:
    write(tmp_path, 3, world, compressed=compressed)
    write(tmp_path, 12, 1)
    assert list(read_rollouts(tmp_path)) == [(3, WHOLE), (12, WHOLE)]
    assert [len(rollout.paths) for rollout in list_rollouts(tmp_path).values()] == [world, 1]


def test_records_are_sorted_by_group_and_sibling(tmp_path: Path) -> None:
    """Whichever rank wrote them."""
    for rank in range(3):
        RolloutLog(tmp_path, rank=rank, world=3).write(0, WHOLE[2 - rank :: 3])
    assert list(read_rollouts(tmp_path)) == [(0, WHOLE)]


def test_a_plain_file_comes_before_its_compressed_twin(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    for path in list(tmp_path.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(b"half of a fi"))
    (tmp_path / ".tmp-rollout-000001.jsonl").write_text("{}\n")
    (tmp_path / "rollout-000002.4-of-4.jsonl").write_text("{}\n")
    assert list(read_rollouts(tmp_path)) == [(0, WHOLE)]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGES: dict[str, tuple[bool, Callable[[Path], None]]] = {
    "the last line is cut": (False, cut),
    "a line is no JSON": (False, lambda path: path.write_text("{}\nno\n{}\n")),
    "the compressed file is cut": (True, cut),
    "it is not compressed": (True, lambda path: path.write_text("{}\n")),
}


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_damaged_file_is_named(world: int, case: str, tmp_path: Path) -> None:
    compressed, damage = DAMAGES[case]
    write(tmp_path, 5, world, compressed=compressed)
    path = list_rollouts(tmp_path)[5].paths[-1]
    damage(path)
    with pytest.raises(CoveyError, match="rollout 5") as raised:
        list(read_rollouts(tmp_path, may_be_unfinished=True))
    assert str(path) in str(raised.value)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    write(tmp_path, 0, 4, 0, 2, 3)
    rollout = list_rollouts(tmp_path)[0]
    assert rollout.is_incomplete and len(rollout.paths) == 3
    with pytest.raises(CoveyError, match="rollout 0") as raised:
        read_rollout(rollout)
    assert "rollout-000000.1-of-4.jsonl" in str(raised.value)
    assert "rollout-000000.2-of-4.jsonl" not in str(raised.value)


def test_of_many_missing_files_some_are_named(tmp_path: Path) -> None:
    write(tmp_path, 0, 12, 1)
    problem = list_rollouts(tmp_path)[0].problem
    assert "0-of-12" in problem and "3-of-12" in problem and "4-of-12" not in problem and "8 more" in problem


def test_a_newest_rollout_may_be_unfinished(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    write(tmp_path, 1, 2, 0)
    assert numbers(tmp_path, may_be_unfinished=True) == [0]
    with pytest.raises(CoveyError, match="rollout 1"):
        numbers(tmp_path)
    write(tmp_path, 2, 2)
    with pytest.raises(CoveyError, match="rollout 1"):
        numbers(tmp_path, may_be_unfinished=True)
    shutil.rmtree(tmp_path)
    assert numbers(tmp_path, may_be_unfinished=True) == []


def test_sets_of_different_numbers_of_ranks_are_not_mixed(tmp_path: Path) -> None:
    """A complete set is the rollout; of two nobody knows which is meant."""
    write(tmp_path, 0, 4, 0, 1, 3)
    write(tmp_path, 0, 2, 1)
    assert "1-of-2" not in list_rollouts(tmp_path)[0].problem
    with pytest.raises(CoveyError, match="0-of-2"):
        list(read_rollouts(tmp_path))
    write(tmp_path, 0, 2, 0)
    assert list(read_rollouts(tmp_path)) == [(0, WHOLE)]
    rollout_path(tmp_path, 0).write_text("".join(json.dumps(record) + "\n" for record in WHOLE))
    with pytest.raises(CoveyError, match="1, 2"):
        list(read_rollouts(tmp_path))


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write(0, [{"a": 1}])
    program = (
        "import sys; from pathlib import Path; from covey.telemetry.rollouts import read_rollouts\n"
        "import covey.telemetry.files, covey.telemetry.plot, covey.telemetry.console\n"
        "assert len(list(read_rollouts(Path(sys.argv[1])))) == 1\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0
