"""`covey mismatch RUN [--rollout N] [--json]`: what explains the gap between sampler and learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING

from covey.cli.verbs import nameless
from covey.config.argv import read_words
from covey.config.unreadable import fixes_of
from covey.errors import ConfigError, CoveyError
from covey.options.verbs import MismatchOptions
from covey.paths import trouble
from covey.plan.problem import problem
from covey.telemetry.rollouts import list_rollouts
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.texts.terminal import say, say_json
from covey.types import Fix

if TYPE_CHECKING:
    from covey.training.mismatch import Mismatch


def mismatch(argv: Sequence[str]) -> int:
    """Print what was found; ConfigError where the directory is none of a run, or cannot be scored again."""
    options, words = read_words("mismatch", argv, MismatchOptions)
    if not words:
        usage = tr("`covey mismatch runs/NAME --rollout N`")
        raise ConfigError([nameless("mismatch", tr("No run is given."), usage)])
    run = Path(words[0])
    if (unread := trouble(run)) is not None:
        seen = tr("{path} {words}.", path=str(run), words=unread.words)
        usual = tr("give the directory of a run that you can read")
        raise ConfigError([problem("E408", "mismatch", seen, "", *fixes_of(unread, usual))])
    numbers = list(list_rollouts(run / "rollouts"))
    if not isfile(run / "config.yaml") or not numbers:
        seen = tr("{run} has no config.yaml, or no rollouts.", run=run)
        raise ConfigError(
            [problem("E408", "mismatch", seen, "", Fix(text=tr("give the directory of a run")))]
        )
    number = numbers[-1] if options.rollout is None else options.rollout
    if number not in numbers:
        seen = tr("{run} has no rollout {number}.", run=run, number=number)
        known = tr("give one of {first} to {last}", first=numbers[0], last=numbers[-1])
        raise ConfigError([problem("E408", "rollout", seen, "", Fix(text=known))])
    from covey.training.mismatch import measure

    try:
        found = measure(run, number)
    except ConfigError:
        raise
    except CoveyError as error:
        other = Fix(text=tr("give another rollout, or a run whose checkpoints are kept"))
        raise ConfigError([problem("E408", "mismatch", f"{error}", "", other)]) from error
    if options.json_:
        say_json({**asdict(found), "rollout": number, "explained": list(found.explained)})
    else:
        say("\n".join(map(spoken, _lines(found, number))))
    return 0


def _lines(found: Mismatch, rollout: int) -> list[str]:
    lines = [
        tr(
            "rollout {rollout}: {num_tokens:,} tokens of step {version}, scored by {weights}",
            rollout=rollout,
            num_tokens=found.num_tokens,
            version=found.version,
            weights=found.weights,
        ),
        *(tr("note  {words}", words=words) for words in found.notes),
        "",
        tr("|sampler - learner| in nats      mean    largest     signed"),
    ]
    for score in found.scores:
        words = score.changed or tr("as the run computes")
        lines.append(f"{score.mean:>36.2e} {score.largest:>10.2e} {score.signed:>+10.2e}  {words}")
    return [*lines, "", _verdict(found)]


def _verdict(found: Mismatch) -> str:
    if found.is_rounding:
        return tr("sampler and learner agree within the rounding of the dtype")
    if found.is_other_step:
        return tr(
            "the weights are of another step, which makes a gap of its own; --save_steps 1 keeps each step's"
        )
    if found.explained:
        return tr("the gap is explained by: {changes}", changes=joined("; ", found.explained))
    return tr("none of these changes explains the gap")
