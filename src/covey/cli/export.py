"""`covey export CHECKPOINT [--merge] [--output_dir DIR] [--base DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from covey.checkpoint.manifest import export_target
from covey.config.names import normalise
from covey.config.values import FALSE_WORDS, TRUE_WORDS
from covey.errors import ConfigError, CoveyError
from covey.plan.problem import problem
from covey.types import Fix, Problem

_USAGE = """\
usage: covey export CHECKPOINT [--merge] [--output_dir DIR] [--base DIR]

Writes the model of a checkpoint without what only a resume needs. With --merge an adapter is added to its
base model, and the result is loaded again and compared: the same logits, or nothing is written.

  --output_dir DIR   where to; must not exist yet. Not given: CHECKPOINT-merged, or CHECKPOINT-model.
  --base DIR         the base model, where it no longer lies at the path that the adapter names.
"""


def export(argv: Sequence[str]) -> int:
    """Export a checkpoint and print where it is; ConfigError carries what is wrong with the words."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(_USAGE)
        return 0
    words, flags = _read(argv)
    checkpoint = Path(words[0])
    merge = flags.get("merge", "false") != "false"
    target = Path(flags["output_dir"]) if "output_dir" in flags else export_target(checkpoint, merge=merge)
    _refuse(checkpoint, target)
    from covey.training.export import export as run

    base = Path(flags["base"]) if "base" in flags else None
    try:
        result = run(checkpoint, target, merge=merge, base=base)
    except CoveyError as error:
        raise ConfigError([_failed(checkpoint, error)]) from error
    if result.merged:
        sys.stdout.write(
            f"merged: on {result.num_prompts} prompts the logits of the exported {result.dtype} model differ "
            f"from those with the adapter by at most {result.max_logit_difference:.3g}\n"
        )
    sys.stdout.write(f"written to {result.target}\n")
    return 0


def _read(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words and the flags of the command."""
    words: list[str] = []
    flags: dict[str, str] = {}
    rest = list(argv)
    unknown = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, _, value = word.partition("=")
        name = {"merge_lora": "merge"}.get(normalise(name), normalise(name))
        if name == "merge":
            is_said = bool(rest) and rest[0].lower() in TRUE_WORDS | FALSE_WORDS
            said = (value or (rest.pop(0) if is_said else "true")).lower()
            flags[name] = "false" if said in FALSE_WORDS else "true"
        elif name in ("output_dir", "base") and (value or (rest and not rest[0].startswith("-"))):
            flags[name] = value or rest.pop(0)
        else:
            unknown.append(word)
    if unknown or len(words) != 1:
        raise ConfigError([_stray([*unknown, *words[1:]])])
    return words, flags


def _stray(words: Sequence[str]) -> Problem:
    return problem(
        "E108",
        "export",
        f"`{' '.join(words)}` is nothing that `covey export` takes." if words else "No checkpoint is named.",
        "A flag of another verb, or a value that was left out.",
        Fix(text="`covey export CHECKPOINT --merge --output_dir DIR`"),
    )


def _refuse(checkpoint: Path, target: Path) -> None:
    problems = []
    if not checkpoint.is_dir():
        problems.append(
            problem(
                "E404",
                "export",
                f"{checkpoint} is no directory.",
                "A misspelt path; a run's checkpoints are called checkpoint-N.",
                Fix(text="give the directory of a checkpoint: runs/NAME/checkpoint-N"),
            )
        )
    if target.exists():
        problems.append(
            problem(
                "E402",
                "output_dir",
                f"{target} is there already.",
                "The same command was given before.",
                Fix(text="another name: --output_dir DIR"),
            )
        )
    if problems:
        raise ConfigError(problems)


def _failed(checkpoint: Path, error: CoveyError) -> Problem:
    return problem(
        "E404",
        "export",
        f"{checkpoint}: {error}",
        "A checkpoint that is damaged, or a base model that has moved or changed.",
        Fix(text="name the base model where it lies now: --base DIR"),
        Fix(text="another checkpoint of the run"),
    )
