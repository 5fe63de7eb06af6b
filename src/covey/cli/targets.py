"""What a verb that works on a checkpoint or a model says where it is given neither (E413)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from os.path import exists
from pathlib import Path

from covey.checkpoint.examine import neither
from covey.config.checkpoints import checkpoints_around
from covey.config.quickstart import BUILT_IN_NAMES
from covey.config.unreadable import fixes_of
from covey.paths import trouble
from covey.plan.problem import problem
from covey.texts import Whole, joined, tr
from covey.types import Fix, Problem


def refused(verb: str, argv: Sequence[str], word: str, option: str = "") -> Problem | None:
    """Return the problem of a word that names no checkpoint and no model, with the command that works.

    `argv` are the words behind the verb, `option` is the one that the word was given for.
    """
    why = neither(Path(word))
    if why is None:
        return None
    around = checkpoints_around(Path(word))
    cause, found = "", trouble(word)
    if found is not None:
        usual = tr("give the directory of a checkpoint or of a model that you can read")
        return problem(
            "E413", option or verb, tr("{path} {why}.", path=word, why=why), "", *fixes_of(found, usual)
        )
    if around and not exists(Path(word)):
        cause = tr(
            "The checkpoints of this run are {names}.", names=joined(", ", (path.name for path in around))
        )
    elif word in BUILT_IN_NAMES:
        cause = tr("{word} is a built-in model; it is not a directory here.", word=word)
    elif not around:
        cause = tr("The path may be misspelled, or relative to another directory.")
    usual = tr("give the directory of a checkpoint or of a model: runs/NAME/checkpoint-N")
    fixes = [Fix(text=tr("`{command}`", command=_command(verb, argv, word, str(p)))) for p in around[-1:]]
    seen = tr("{path}: {why}.", path=word, why=why)
    return problem("E413", option or verb, seen, cause, *(fixes or [Fix(text=usual)]))


def _command(verb: str, argv: Sequence[str], word: str, instead: str) -> str:
    words = [instead if each == word else each.replace(f"={word}", f"={instead}") for each in argv]
    return Whole(f"covey {verb} {shlex.join(words)}")
