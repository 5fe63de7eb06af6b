"""`covey eval MODEL_OR_CHECKPOINT --val_dataset FILE ... --reward_funcs ...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os.path import exists
from pathlib import Path

from covey.cli.targets import refused
from covey.cli.verbs import nameless
from covey.config import Parsed, parse
from covey.config.checkpoints import checkpoints_around, list_checkpoints
from covey.config.evaluation import eval_options
from covey.config.names import normalise
from covey.errors import ConfigError
from covey.paths import trouble
from covey.quickstart.built_in import BUILT_IN
from covey.texts import tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import Severity


def evaluate(argv: Sequence[str]) -> int:
    """Print the metrics of a model on held-out prompts, and write them with every completion."""
    model, base, parsed = _read(argv)
    directory = Path(model)
    resolved = eval_options(model, parsed.typed, parsed.problems, base)
    # Of a name that may be of a hub, and of any other directory, the facts say more.
    is_of_run = bool(list_checkpoints(directory)) or not (exists(directory) or trouble(directory))
    no_model = refused("eval", argv, model, "model") if is_of_run and checkpoints_around(directory) else None
    if no_model is not None:
        faults = [p for p in resolved.problems if p.severity is Severity.ERROR]
        raise ConfigError([no_model, *faults])
    from covey.checks.evaluation.look import survey_checked

    with survey_checked(resolved, directory) as surveyed:
        from covey.training.standalone import evaluate as run

        done = run(resolved, surveyed, directory)
    width = max(len(name) for name in done.metrics)
    lines = [
        f"{name:<{width}}  {'–' if m.value is None else format(m.value, '.4g'):>8}  n {m.count}"
        for name, m in done.metrics.items()
    ]
    say("\n".join([*lines, spoken(tr("written to {output_dir}", output_dir=done.output_dir))]))
    return 0


def _read(argv: Sequence[str]) -> tuple[str, str | None, Parsed]:
    """Return the model or checkpoint, the base of an adapter where one is named, and the other options.

    The model is the first word; in a command of ms-swift it is `--adapters`, or else `--model`.
    """
    if argv and not argv[0].startswith("-"):
        return _path_of(argv[0]), None, parse(argv[1:], "eval")
    words = ["--adapters" if normalise(word) == "ckpt_dir" else word for word in argv]
    parsed = parse(words, "eval")
    named = [t.value for name in ("adapters", "model") if (t := parsed.typed.get(name)) is not None]
    if not named:
        usage = tr("`covey eval DIR --val_dataset FILE --reward_funcs accuracy`")
        raise ConfigError([nameless("eval", tr("No model is given to `covey eval`."), usage)])
    others = {name: typed for name, typed in parsed.typed.items() if name not in ("adapters", "model")}
    base = str(named[1]) if len(named) > 1 else None
    return _path_of(str(named[0])), base, replace(parsed, typed=others)


def _path_of(name: str) -> str:
    return str(BUILT_IN[name].model_dir) if name in BUILT_IN else name
