"""A short torture of the writers; `make torture` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torture.torture import Torture


@pytest.mark.multi
@pytest.mark.parametrize("backend", ["single", "ddp"])
def test_a_run_outlives_kills_full_disks_and_flipped_bits(backend: str, tmp_path: Path) -> None:
    subject = Torture(backend, tmp_path, random.Random(7))
    subject.kill_at_steps(1)
    subject.kill_at_times(1)
    subject.fail_disk(1)
    subject.end()
    subject.flip_bits(4)
    missed = subject.counts["steps that a rank did not have"]
    assert subject.counts["kills at a step of the writer"] + missed >= 2
    assert subject.counts["runs that ended bit-equal"] >= 2
    assert subject.counts["bits flipped, refused by the file's name"] == 4
