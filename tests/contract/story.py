"""Batch 1 with accumulation 32 on every backend: how far the weights move, and KL, step by step.

`python tests/contract/story.py [--write PAGE] [--dtype DTYPE]` prints the table, and keeps it in PAGE.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from contract.backends import KINDS, Kind
from contract.cells import DTYPES, STEPS, Cell, oracle
from contract.compare import norm
from contract.matrix import Bench
from contract.table import with_tables
from contract.worker import Left

# A rate and an epsilon as they are typed, where the contract has larger ones.
USUAL = {"learning_rate": 1e-5, "adam_epsilon": 1e-8, "max_grad_norm": 1.0}
SHOWN = (1, 2, STEPS)
ALONE = "single, all rows in one pass"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--write", type=Path, help="a Markdown file with the marks of the tables")
    parser.add_argument("--only", nargs="*", default=[kind.name for kind in KINDS], help="backends to run")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.name in arguments.only]
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work))
        tables = {"story": table(bench, kinds, arguments.dtype)}
    sys.stdout.write("\n".join([*tables["story"], ""]))
    if arguments.write:
        arguments.write.write_text(with_tables(arguments.write.read_text(), tables))


def table(bench: Bench, kinds: Sequence[Kind], dtype: str) -> list[str]:
    """A line for each backend; 64 rows of a step, of which a pass has one."""
    cell = Cell(world=2, accumulation=32, dtype=dtype)
    left: dict[str, Left] = {}
    runs = [bench.typed(KINDS[0], one, 1, **USUAL) for one in (oracle(cell.problem, dtype), cell)]
    left[ALONE], left["single"] = bench.make(runs, 1)
    for kind in kinds:
        if kind.worlds == (2,):
            (left[kind.name],) = bench.make([bench.typed(kind, cell, 2, **USUAL)], 2)
    columns = [*(f"‖ΔW‖ {step}" for step in SHOWN), *(f"KL {step}" for step in range(1, STEPS + 1))]
    lines = [f"| backend | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    return lines + [f"| {name} | {' | '.join(_figures(one))} |" for name, one in left.items()]


def _figures(left: Left) -> list[str]:
    assert left.code is None, left.words
    moved = [norm(_moved(left, step)) for step in SHOWN]
    return [*(f"{value:.6f}" for value in moved), *(f"{line['kl']:.3e}" for line in left.metrics)]


def _moved(left: Left, step: int) -> Mapping[str, object]:
    return {name: left.weights[step][name].double() - start for name, start in left.weights[0].items()}


if __name__ == "__main__":
    main()
