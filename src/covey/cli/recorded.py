"""The run and the rollout that a verb is given, whose records it reads."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from covey.cli.verbs import nameless
from covey.config.unreadable import fixes_of
from covey.errors import ConfigError
from covey.paths import trouble
from covey.plan.problem import problem
from covey.telemetry.rollouts import list_rollouts
from covey.texts import tr
from covey.types import Fix, Problem


def named_run(verb: str, words: Sequence[str]) -> Path:
    """Return the directory that a verb is given; ConfigError where it is none that can be read."""
    if not words:
        usage = tr("`covey {verb} runs/NAME --rollout N`", verb=verb)
        raise ConfigError([nameless(verb, tr("No run is given."), usage)])
    run = Path(words[0])
    if (unread := trouble(run)) is not None:
        seen = tr("{path} {words}.", path=str(run), words=unread.words)
        usual = tr("give the directory of a run that you can read")
        raise ConfigError([problem("E408", verb, seen, "", *fixes_of(unread, usual))])
    return run


def chosen_rollout(verb: str, run: Path, number: int | None) -> tuple[int, list[Problem]]:
    """Return the number of a rollout of the run, the newest for None, and what stands against it."""
    numbers = list(list_rollouts(run / "rollouts"))
    if not isfile(run / "config.yaml") or not numbers:
        seen = tr("{run} has no config.yaml, or no rollouts.", run=run)
        return -1, [problem("E408", verb, seen, "", Fix(text=tr("give the directory of a run")))]
    if number is None:
        return numbers[-1], []
    if number in numbers:
        return number, []
    seen = tr("{run} has no rollout {number}.", run=run, number=number)
    known = tr("give one of {first} to {last}", first=numbers[0], last=numbers[-1])
    return -1, [problem("E408", "rollout", seen, "", Fix(text=known))]
