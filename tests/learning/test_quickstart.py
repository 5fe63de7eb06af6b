"""`covey quickstart` lifts held-out accuracy from at most 0.40 to at least 0.80."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_quickstart_learns(seed: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "covey", "quickstart", "--seed", str(seed), "--output_dir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out accuracy +(0\.\d+) -> (0\.\d+)", done.stdout)
    assert found, done.stdout
    assert float(found.group(1)) <= 0.40
    assert float(found.group(2)) >= 0.80


def test_quickstart_starts_to_learn(tmp_path: Path) -> None:
    """Forty steps raise the reward by far more than its noise (0.03 over ten steps of 64 completions)."""
    done = subprocess.run(
        [sys.executable, "-m", "covey", "quickstart", "--max_steps", "40", "--output_dir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.08
    assert "held-out accuracy" in done.stdout and "next:" in done.stdout
    assert (tmp_path / "run" / "reward.png").is_file()
