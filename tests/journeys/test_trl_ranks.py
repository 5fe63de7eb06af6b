"""The trainer of TRL's scripts in two processes under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.machines import plain_environment

pytestmark = pytest.mark.multi

SCRIPT = str(Path(__file__).with_name("trl_ranks.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**plain_environment(), **own}
    return subprocess.run(
        [*TORCHRUN, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )


def test_what_one_rank_asks_for_all_do(tmp_path: Path) -> None:
    """And all begin with the adapter of the first, and end with the same one."""
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == two and one["step"] == 3
    assert [word.rpartition(" ")[0] or word for word in one["seen"]] == ["evaluate 1", "save", "save"]
    held = load_file(tmp_path / "out" / "checkpoint-3" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "saved-3" / "adapter_model.safetensors")
    assert all(saved[name].equal(tensor) for name, tensor in held.items())
    total = {n.replace(".weight", ".default.weight"): t.double().sum().item() for n, t in held.items()}
    assert total == one["adapter"]
    assert [path.name for path in (tmp_path / "out").glob("start-adapter-*")] == ["start-adapter-1"]


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    done = run(tmp_path, "fails")
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: a callback of rank 1") == 1 and "F131" in done.stderr
    assert not (tmp_path / "rank-0.json").exists()
