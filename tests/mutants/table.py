"""Prints what names each planted fault, when, and after how many seconds: `make mutants`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants.faults import MUTANTS
from mutants.harness import Surveys, run_with


def main() -> int:
    """One line a fault; 1 where one of them is not named as it must be."""
    surveys, killed = Surveys(), 0
    sys.stdout.write(f"{'planted fault':44} {'must be':>8} {'named by':>9} {'step':>5} {'seconds':>8}\n")
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as work:
            seen = run_with(mutant, surveys, Path(work) / "run")
        is_named = (seen.code, seen.step) == (mutant.code, mutant.step)
        killed += is_named
        word, step = seen.code if is_named else f"{seen.code}!", str(seen.step)
        sys.stdout.write(f"{mutant.name:44} {mutant.code:>8} {word:>9} {step:>5} {seen.seconds:8.2f}\n")
    surveys.close()
    total = len(MUTANTS)
    sys.stdout.write(f"\n{killed} of {total} named by their own code at the first step where they can show\n")
    return 0 if killed == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
