"""Two processes, with a fault in the second: started here for the table and the tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from covey.meeting import EXIT_FILE
from covey.training.process import ranks
from mutants import faults_publish, faults_ranks, stories
from mutants.harness import Mutant, Seen, Surveys, run_with, warned
from support.processes import run_in_processes

# Seconds after which two processes that say nothing are ended.
_LIMIT_S = 240
_ALL = {
    m.name: m
    for m in (
        *(*faults_ranks.MUTANTS, *faults_ranks.HEALTHY, *stories.RANKS),
        *(*faults_publish.RANKS, *faults_publish.HEALTHY_RANKS),
    )
}


def seen_in_two(mutants: Sequence[Mutant], work: Path) -> dict[str, Seen]:
    """What names each fault of these, in two processes for all of them; one that hangs has to be alone."""
    assert len(mutants) == 1 or not any(m.hangs for m in mutants), "a hang ends its processes"
    work.mkdir(parents=True, exist_ok=True)
    (work / "names.json").write_text(json.dumps([m.name for m in mutants]))
    exit_file = {EXIT_FILE: str(work / "exit")}
    run_in_processes(__file__, work, timeout=_LIMIT_S, environment=exit_file)
    if mutants[0].hangs:
        return {mutants[0].name: _ended(work / "0")}
    return {m.name: Seen(**json.loads((work / f"{n}.json").read_text())) for n, m in enumerate(mutants)}


def _ended(run: Path) -> Seen:
    """What the watchdog said, and how long the rank had stood still by then."""
    stuck = json.loads((run / "hang-0001" / "rank-1.json").read_text())
    return warned(run, stuck["seconds"])


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    surveys = Surveys()
    with ranks(int(os.environ["WORLD_SIZE"])) as comm, pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(json.loads((work / "names.json").read_text())):
            if _ALL[name].hangs:
                faults_ranks.quick_to_judge(patch)
            seen = run_with(_ALL[name], surveys, work / str(number), comm)
            if comm.rank == 0:
                (work / f"{number}.json").write_text(json.dumps(asdict(seen)))
        surveys.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
