"""`covey eval MODEL_OR_CHECKPOINT --val_dataset FILE ... --reward_funcs ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from covey.config import parse
from covey.config.evaluation import eval_options
from covey.errors import ConfigError
from covey.plan.problem import problem
from covey.quickstart.task import MODEL_DIR
from covey.texts import tr
from covey.texts.language import spoken
from covey.types import Fix, Problem


def evaluate(argv: Sequence[str]) -> int:
    """Print the metrics of a model on held-out prompts, and write them with every completion."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError([_nameless()])
    model = str(MODEL_DIR) if argv[0] == "quickstart" else argv[0]
    parsed = parse(argv[1:], "eval")
    resolved = eval_options(model, parsed.typed, parsed.problems)
    from covey.training.facts.evaluation import survey_checked

    with survey_checked(resolved) as surveyed:
        from covey.training.standalone import evaluate as run

        done = run(resolved, surveyed, Path(model))
    width = max(len(name) for name in done.metrics)
    lines = [
        f"{name:<{width}}  {'–' if m.value is None else format(m.value, '.4g'):>8}  n {m.count}"
        for name, m in done.metrics.items()
    ]
    sys.stdout.write(
        "\n".join([*lines, spoken(tr("written to {output_dir}", output_dir=done.output_dir))]) + "\n"
    )
    return 0


def _nameless() -> Problem:
    return problem(
        "E105",
        "model",
        tr("No model is given to `covey eval`."),
        tr("The first argument is the directory of a model or of a checkpoint."),
        Fix(text=tr("`covey eval DIR --val_dataset FILE --reward_funcs accuracy`")),
    )
