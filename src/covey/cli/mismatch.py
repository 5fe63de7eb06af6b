"""`covey mismatch RUN [--rollout N] [--json]`: what explains the gap between sampler and learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from covey.cli.recorded import chosen_rollout, named_run
from covey.config.argv import read_words
from covey.errors import ConfigError, CoveyError
from covey.options.verbs import MismatchOptions
from covey.plan.problem import problem
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.texts.terminal import say, say_json
from covey.types import Fix

if TYPE_CHECKING:
    from covey.training.mismatch import Mismatch


def mismatch(argv: Sequence[str]) -> int:
    """Print what was found; ConfigError where the directory is none of a run, or cannot be scored again."""
    options, words = read_words("mismatch", argv, MismatchOptions)
    run = named_run("mismatch", words)
    number, faults = chosen_rollout("mismatch", run, options.rollout)
    if faults:
        raise ConfigError(faults)
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
