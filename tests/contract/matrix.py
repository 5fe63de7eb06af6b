"""The contract as runs: cells with their oracles, stops with their resumes, and planted faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract import cells, rollouts
from contract.backends import Kind
from contract.cells import SAVED, Cell, Problem
from contract.compare import Gap, broken, gaps, widened
from contract.faults import CONTRACT, Fault
from contract.worker import Left, Run, run_all
from covey.selftest.compare import far
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
        return Run(
            options={**own, **kind.options, **more},
            layout=cell.layout,
            owned=cell.owned,
            dealt=cell.dealt,
            fault=fault,
        )

    def run(self, kind: Kind, given: Sequence[Cell], processes: int) -> list[Left]:
        """What these cells left on a backend."""
        return self.make([self.typed(kind, cell, processes) for cell in given], processes)

    def make(self, runs: Sequence[Run], processes: int, *, kept: Sequence[Path] = ()) -> list[Left]:
        """What these runs left, whose directories are then deleted but for those that are `kept`."""
        left = run_all(runs, self.folder(), processes=processes)
        for path in {Path(run.options["output_dir"]) for run in runs} - {*kept}:
            shutil.rmtree(path, ignore_errors=True)
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


class Trial:
    """All that is asked of a backend, in two sets of processes: one for what starts anew, here, and one for
    what goes on with stopped runs (`go_on`).

    `cells` are what the cells left, `named` what names each fault, and `whole` and `cut` the runs of
    `stopped` that went on and that were stopped.
    """

    def __init__(
        self,
        bench: Bench,
        kind: Kind,
        given: Sequence[Cell],
        *,
        faults: Sequence[Fault] = (),
        stopped: Sequence[Cell] = (),
    ) -> None:
        self.bench, self.kind, self.world, self.stopped = bench, kind, kind.worlds[-1], tuple(stopped)
        self.cells: dict[Cell, Left] = {}
        for world in kind.worlds[:-1]:
            own = [cell for cell in given if cell.world == world]
            self.cells |= dict(zip(own, bench.run(kind, own, world), strict=True))
        own = [cell for cell in given if cell.world == self.world]
        self.faults = [f for f in faults if f.name not in kind.nonsense]
        anew = [f for f in self.faults if not f.is_resumed]
        cuts = [self._typed(cell, stop_after_steps=SAVED) for cell in stopped]
        self._folders = [Path(run.options["output_dir"]) for run in cuts]
        runs = [
            *(self._typed(cell) for cell in own),
            *(self._typed(fault_cell(kind, fault), fault.name) for fault in anew),
            *(self._typed(cell) for cell in stopped),
            *cuts,
        ]
        left = iter(bench.make(runs, self.world, kept=self._folders))
        self.cells |= {cell: next(left) for cell in own}
        self.named = {
            f: _named_by(one, bench.gaps(fault_cell(kind, f), one))
            for f, one in zip(anew, left, strict=False)
        }
        self.whole = [next(left) for _ in stopped]
        self.cut = list(left)

    def go_on(self, others: Sequence[Trial]) -> list[list[Left]]:
        """The stopped runs of other backends, and of this one, as this one goes on with them. The faults of
        a resume are named by then."""
        late = [f for f in self.faults if f.is_resumed]
        runs = [run for other in others for run in self._resumes(other)]
        left = self.bench.make([*runs, *(self._resumes(self, f.name)[0] for f in late)], self.world)
        for fault, resumed in zip(late, left[len(runs) :], strict=True):
            self.named[fault] = _named_by(resumed, same_layout_gaps(resumed, self.whole[0]))
        found = iter(left)
        return [[next(found) for _ in other.stopped] for other in others]

    def _resumes(self, other: Trial, fault: str | None = None) -> list[Run]:
        runs = []
        for cell, folder in zip(other.stopped, other._folders, strict=True):
            copy = shutil.copytree(folder, self.bench.folder())
            runs.append(self._typed(cell, fault, output_dir=str(copy), resume_from_checkpoint="latest"))
        return runs

    def _typed(self, cell: Cell, fault: str | None = None, **more: Any) -> Run:
        return self.bench.typed(self.kind, cell, self.world, fault, **more)


def resume_gaps(resumed: Sequence[Left], stopped: Trial, by: Trial) -> dict[Cell, list[Gap]]:
    """What the runs of a trial that another one, or the same, went on with are held to."""
    out = {}
    for cell, left, cut, whole in zip(stopped.stopped, resumed, stopped.cut, stopped.whole, strict=True):
        is_same = stopped is by
        out[cell] = same_layout_gaps(left, whole) if is_same else other_layout_gaps(left, cut, whole, cell)
    return out


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
        Gap("next gradient", far(resumed.gradients[0], whole.gradients[SAVED]), bound),
    ]


def _num_different(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    assert expected, "nothing to compare"
    names = actual.keys() | expected.keys()
    return sum(
        name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
        for name in names
    )


def fault_cell(kind: Kind, fault: Fault) -> Cell:
    """The cell that a fault is planted in; rows move where one rank has those of the other."""
    cell = Cell(tuner=fault.tuner, world=kind.worlds[-1], accumulation=4, rows="ragged", layout="packed")
    return cell if fault.arrives is None else replace(cell, owned="0")


def _named_by(left: Left, found: Sequence[Gap]) -> str:
    """What names a fault: a code, or the first comparison of the contract that fails; empty where nothing
    does."""
    if left.code is not None:
        return left.code
    bad = broken(found)
    return f"{CONTRACT}: {bad[0]}" if bad else ""
