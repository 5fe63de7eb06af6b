"""Prints what names each planted fault, when, and after how many seconds: `make mutants`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants import (
    faults,
    faults_images,
    faults_inputs,
    faults_publish,
    faults_ranks,
    faults_selection,
    faults_turns,
    stories,
)
from mutants.harness import Mutant, Seen, Surveys, run_with
from mutants.ranks import seen_in_two

Found = Iterator[tuple[Mutant, Seen]]


def in_one(mutants: Sequence[Mutant], work: Path) -> Found:
    """Each in this process."""
    surveys = Surveys()
    for number, mutant in enumerate(mutants):
        # Says how far the data are read.
        with redirect_stderr(StringIO()):
            seen = run_with(mutant, surveys, work / str(number))
        yield mutant, seen
    surveys.close()


def in_two(mutants: Sequence[Mutant], work: Path) -> Found:
    """Each in the second of two processes."""
    calm = [m for m in mutants if not m.hangs]
    for number, together in enumerate([calm, *([m] for m in mutants if m.hangs)]):
        if together:
            seen = seen_in_two(together, work / str(number))
            yield from ((m, seen[m.name]) for m in together)


GROUPS: Sequence[tuple[str, Callable[[Sequence[Mutant], Path], Found], Sequence[Mutant]]] = (
    ("one process", in_one, faults.MUTANTS),
    ("replayed groups", in_one, faults_selection.MUTANTS),
    ("episodes of several turns", in_one, faults_turns.MUTANTS),
    ("images", in_one, faults_images.MUTANTS),
    ("what a run is given", in_one, faults_inputs.MUTANTS),
    ("a publish", in_one, faults_publish.MUTANTS),
    ("one of two processes", in_two, faults_ranks.MUTANTS),
    ("a publish of one of two processes", in_two, faults_publish.RANKS),
    ("the five stories", in_one, stories.MUTANTS),
    ("the five stories, one of two processes", in_two, stories.RANKS),
)


def main() -> int:
    """One line a fault; 1 where one of them is not named as it must be."""
    total = killed = 0
    slowest = 0.0
    for title, find, mutants in GROUPS:
        sys.stdout.write(f"\n{title:46} {'must be':>9} {'named by':>10} {'step':>5} {'seconds':>8}\n")
        with tempfile.TemporaryDirectory() as work:
            for mutant, seen in find(mutants, Path(work)):
                is_named = seen.is_of(mutant)
                total, killed = total + 1, killed + is_named
                slowest = max(slowest, seen.seconds)
                word = f"{seen.code}{'' if is_named else '!'}"
                line = f"{mutant.name:46} {mutant.code:>9} {word:>10} {seen.step!s:>5} {seen.seconds:8.2f}\n"
                sys.stdout.write(line)
                sys.stdout.flush()
    sys.stdout.write(
        f"\n{killed} of {total} ({killed / total:.0%}) named by their own code at the first step where they "
        f"can show, the slowest after {slowest:.0f} s\n"
        "step start: before weights load; 0: before the first step\n"
    )
    return 0 if killed == total else 1


if __name__ == "__main__":
    sys.exit(main())
