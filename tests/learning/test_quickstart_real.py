"""`make quickstart-real` lifts a real model's accuracy on held-out word problems to at least one half."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.real import real

SCRIPT = Path(__file__).parents[2] / "bench" / "quickstart_real.py"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_a_real_model_learns_word_problems(seed: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(real("smollm2")), "--seed", str(seed), "--output_dir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy on held-out problems +(0\.\d+) -> (0\.\d+)", done.stdout)
    assert found, done.stdout
    before, after = map(float, found.groups())
    assert before < 0.3
    assert after >= 0.5
