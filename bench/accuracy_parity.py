"""Score a table of answers with covey, math-verify, TRL and ms-swift: `python bench/accuracy_parity.py`.

The table is tests/golden/accuracy_pairs.jsonl: golds, completions and the value that a teacher gives, fixed
before any scorer saw them. covey is its reward `accuracy`. math-verify is called with its defaults, and once
more as TRL's `accuracy_reward` calls it. ms-swift is its own class, in its own environment (`--swift`);
without it that column is left out. Prints how many right values each gives, how often two agree, and why the
others differ from the right value; then the counts once more for golds that have LaTeX delimiters. `--write`
puts these tables into docs/accuracy.md. No model, no GPU; about five minutes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from parity import tables
from parity.pairs import HERE, Pair, SideFailed, covey_verdicts, read_pairs, verdicts_of, with_dollars


def main() -> int:
    """Score the table with every side and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swift", help="the Python of an environment with ms-swift")
    parser.add_argument(
        "--list", action="store_true", help="print every difference from the right value, too"
    )
    parser.add_argument("--write", type=Path, help="a Markdown file with the marks of the tables")
    arguments = parser.parse_args()
    if arguments.swift and shutil.which(arguments.swift) is None:
        parser.error(f"--swift {arguments.swift}: no such program; `make accuracy-parity` makes one")
    if arguments.write and not (arguments.swift and arguments.write.is_file()):
        parser.error(
            f"--write {arguments.write}: needs a file that is there, and --swift for its last column"
        )
    commands = {way: [sys.executable, str(HERE / "on_math_verify.py"), way] for way in ("readme", "trl")}
    if arguments.swift:
        commands["swift"] = [arguments.swift, str(HERE / "on_swift.py")]
    pairs = read_pairs()
    delimited = [with_dollars(pair) for pair in pairs]
    try:
        sides = _verdicts(pairs, commands)
        sections = {
            "counts": tables.counts(pairs, sides),
            "sources": tables.by_source(pairs, sides),
            "agreement": tables.agreement(pairs, sides),
            "causes": tables.by_cause(pairs, sides),
            "delimited": tables.counts(delimited, _verdicts(delimited, commands)),
        }
    except SideFailed as error:
        sys.exit(str(error))
    written = {name: list(lines) for name, lines in sections.items()}
    for name, lines in written.items():
        sys.stdout.write("\n".join([name, *lines, "", ""]))
    if arguments.list:
        sys.stdout.write("".join(f"{line}\n" for line in tables.differences(pairs, sides)))
    if arguments.write:
        page = tables.with_tables(arguments.write.read_text(encoding="utf-8"), written)
        arguments.write.write_text(page, encoding="utf-8")
    return 0


def _verdicts(pairs: Sequence[Pair], commands: dict[str, list[str]]) -> tables.Sides:
    sides = {"covey": covey_verdicts(pairs)}
    with tempfile.TemporaryDirectory() as work:
        return sides | {side: verdicts_of(command, pairs, Path(work)) for side, command in commands.items()}


if __name__ == "__main__":
    sys.exit(main())
