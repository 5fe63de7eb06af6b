"""The contract as runs: cells with their oracles, stops with their resumes, and planted faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract import cells, rollouts
from contract.backends import Kind
from contract.cells import SAVED, Cell, Problem
from contract.compare import Gap, broken, distance, gaps, widened
from contract.faults import CONTRACT, FAULTS, Fault
from contract.worker import Left, Run, run_all
from support.models import save_model

_TWO_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "llama": {"num_hidden_layers": 2},
}


class Bench:
    """Models and rollouts in a folder, each written once, and the oracles of problems, each run once."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._oracles: dict[Cell, Left] = {}
        self._num_folders = 0

    def typed(self, kind: Kind, cell: Cell, processes: int, fault: str | None = None, **more: Any) -> Run:
        """A cell as it is typed for a backend; `more` are further options."""
        model, replay = self.model(cell.family), self.replay(cell)
        own = cells.options(cell, model, replay, self.folder(), processes=processes)
        return Run(kind=kind.name, options={**own, **kind.options, **more}, layout=cell.layout, fault=fault)

    def run(self, kind: Kind, given: Sequence[Cell], processes: int) -> list[Left]:
        """What these cells left on a backend."""
        return self.make([self.typed(kind, cell, processes) for cell in given], processes)

    def make(self, runs: Sequence[Run], processes: int) -> list[Left]:
        """What these runs left, whose directories are then deleted."""
        left = run_all(runs, self.folder(), processes=processes)
        for run in runs:
            shutil.rmtree(str(run.options["output_dir"]), ignore_errors=True)
        return left

    def run_oracles(self, single: Kind, wanted: Iterable[Cell]) -> None:
        """Run the oracles that these cells need and that have not been run yet, in one process."""
        needed = {
            cells.oracle(cell.problem, dtype): None for cell in wanted for dtype in ("float32", cell.dtype)
        }
        missing = [oracle for oracle in needed if oracle not in self._oracles]
        if missing:
            self._oracles.update(zip(missing, self.run(single, missing, 1), strict=True))

    def oracle(self, problem: Problem, dtype: str = "float32") -> Left:
        """What an oracle left."""
        return self._oracles[cells.oracle(problem, dtype)]

    def gaps(self, cell: Cell, left: Left) -> list[Gap]:
        """Everything that a cell is held to."""
        found = gaps(left, self.oracle(cell.problem), cell)
        return found if cell.dtype == "float32" else widened(found, self._rounded())

    def _rounded(self) -> dict[str, float]:
        """The largest gap of one process in bfloat16, of all problems."""
        out: dict[str, float] = {}
        for cell, left in self._oracles.items():
            if cell.dtype == "bfloat16":
                for gap in gaps(left, self.oracle(cell.problem), cell):
                    out[gap.what] = max(gap.found, out.get(gap.what, 0.0))
        return out

    def folder(self) -> Path:
        """A folder that is not there yet."""
        self._num_folders += 1
        return self._work / f"run-{self._num_folders}"

    def model(self, family: str) -> Path:
        """A random model of a family, of two layers."""
        path = self._work / family
        return path if path.is_dir() else save_model(family, path, **_TWO_LAYERS[family])

    def replay(self, problem: Problem) -> Path:
        """The rollouts of a problem."""
        path = self._work / f"{problem.rows} {problem.world}".replace(" ", "-")
        return path if path.is_dir() else rollouts.write(path, problem.rows, problem.world)


# -- stops and resumes


class Stopped:
    """Runs of a backend that were stopped after a step, beside runs that went on, one of each for a cell."""

    def __init__(self, bench: Bench, kind: Kind, given: Sequence[Cell], processes: int) -> None:
        self.bench, self.kind, self.cells, self.processes = bench, kind, tuple(given), processes
        whole = [bench.typed(kind, cell, processes) for cell in given]
        cut = [bench.typed(kind, cell, processes, stop_after_steps=SAVED) for cell in given]
        left = run_all([*whole, *cut], bench.folder(), processes=processes)
        self.whole, self.cut = left[: len(whole)], left[len(whole) :]
        self._folders = [Path(run.options["output_dir"]) for run in cut]

    def resumed(self, kind: Kind, processes: int, fault: str | None = None) -> list[Left]:
        """The stopped runs as another backend goes on with them, in new processes."""
        runs = []
        for cell, stopped in zip(self.cells, self._folders, strict=True):
            folder = shutil.copytree(stopped, self.bench.folder())
            more = {"output_dir": str(folder), "resume_from_checkpoint": "latest"}
            runs.append(self.bench.typed(kind, cell, processes, fault, **more))
        return self.bench.make(runs, processes)


def same_layout_gaps(resumed: Left, whole: Left) -> list[Gap]:
    """A resumed run against the one that went on: the same to the bit."""
    if resumed.code is not None:
        return [Gap(f"ended by {resumed.code} with {resumed.words!r}", 1.0, 0.0)]
    rest = whole.gradients[SAVED:]
    others = [_num_different(a, e) for a, e in zip(resumed.gradients, rest, strict=True)]
    others += [_num_different(resumed.weights[step], whole.weights[step]) for step in resumed.weights]
    lines = [
        [
            {k: v for k, v in line.items() if not k.startswith(("time/", "throughput/", "memory/"))}
            for line in x
        ]
        for x in (resumed.metrics, whole.metrics)
    ]
    return [
        Gap("steps with another gradient or other weights", float(sum(n > 0 for n in others)), 0.0),
        Gap("the records differ", float(lines[0] != lines[1]), 0.0),
    ]


def other_layout_gaps(resumed: Left, stopped: Left, whole: Left, cell: Cell) -> list[Gap]:
    """A run that goes on in another layout: masters and moments to the bit, and the next gradient.

    In bfloat16 another cut of the step rounds single logprobs by up to 1 %.
    """
    if resumed.code is not None:
        return [Gap(f"ended by {resumed.code} with {resumed.words!r}", 1.0, 0.0)]
    bound = {"float32": 1e-5, "bfloat16": 5e-2}[cell.dtype]
    return [
        Gap("masters and moments", float(_num_different(resumed.states[SAVED], stopped.states[SAVED])), 0.0),
        Gap(
            "weights after loading", float(_num_different(resumed.weights[SAVED], whole.weights[SAVED])), 0.0
        ),
        Gap("next gradient", distance(resumed.gradients[0], whole.gradients[SAVED]), bound),
    ]


def _num_different(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    assert expected, "nothing to compare"
    names = actual.keys() | expected.keys()
    return sum(
        name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
        for name in names
    )


# -- planted faults


def fault_cell(kind: Kind, fault: Fault) -> Cell:
    """The cell that a fault is planted in."""
    world = kind.worlds[-1]
    return Cell(tuner=fault.tuner, world=world, accumulation=4, rows="ragged", layout="packed")


def planted(bench: Bench, kind: Kind) -> dict[Fault, str]:
    """What names each fault on a backend: a code, or the first comparison of the contract that fails; empty
    where nothing does."""
    processes = kind.worlds[-1]
    faults = [f for f in FAULTS if f.name not in kind.nonsense and not f.is_resumed]
    given = [fault_cell(kind, fault) for fault in faults]
    runs = [bench.typed(kind, c, processes, f.name) for c, f in zip(given, faults, strict=True)]
    left = bench.make(runs, processes)
    found = {f: _named_by(one, bench.gaps(c, one)) for f, c, one in zip(faults, given, left, strict=True)}
    for fault in (f for f in FAULTS if f.is_resumed and f.name not in kind.nonsense):
        stopped = Stopped(bench, kind, [fault_cell(kind, fault)], processes)
        (resumed,) = stopped.resumed(kind, processes, fault.name)
        found[fault] = _named_by(resumed, same_layout_gaps(resumed, stopped.whole[0]))
    return found


def _named_by(left: Left, found: Sequence[Gap]) -> str:
    if left.code is not None:
        return left.code
    bad = broken(found)
    return f"{CONTRACT}: {bad[0]}" if bad else ""
