"""`covey eval MODEL_OR_CHECKPOINT --val_dataset FILE ... --reward_funcs ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from covey.cli.help import asks_for_help, help_text
from covey.config import Resolved, Typed, parse, resolve
from covey.config.file import read_file
from covey.config.layers import merge
from covey.config.output import first_free
from covey.errors import ConfigError
from covey.models.adapter_shapes import ADAPTER_CONFIG, adapter_settings
from covey.plan.checks import checks
from covey.plan.problem import problem
from covey.types import Fix, Problem, Severity

_IRRELEVANT = ("E2", "E4", "W1")


def evaluate(argv: Sequence[str]) -> int:
    """Print the metrics of a model on held-out prompts, and write them with every completion."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("eval"))
        return 0
    directory, resolved = read_eval(argv)
    from covey.training.facts import survey

    with survey(resolved.config, 1) as found:
        _refuse(resolved, found.facts, checks(resolved.config, found.facts))
        from covey.training.standalone import evaluate as run

        output = _output(resolved, directory)
        done = run(resolved, found, directory, output)
    width = max(len(name) for name in done.metrics)
    lines = [
        f"{name:<{width}}  {'–' if m.value is None else format(m.value, '.4g'):>8}  n {m.count}"
        for name, m in done.metrics.items()
    ]
    sys.stdout.write("\n".join([*lines, f"written to {done.output_dir}"]) + "\n")
    return 0


def read_eval(argv: Sequence[str]) -> tuple[Path, Resolved]:
    """Return the directory to evaluate and the configuration: that of its run, if it has one, under the
    flags."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError([_nameless()])
    directory = Path(argv[0])
    parsed = parse(argv[1:])
    problems = list(parsed.problems)
    typed = dict(parsed.typed)
    beside = directory.parent / "config.yaml"
    if beside.is_file() and directory.name.startswith("checkpoint-"):
        layer = read_file(str(beside))
        problems += layer.problems
        typed = merge(layer.typed, typed)
    if (directory / ADAPTER_CONFIG).is_file():
        _, base = adapter_settings(directory)
        typed["model"] = Typed(str(base), f"{directory}: the adapter's base")
    else:
        typed["model"] = Typed(argv[0], "the first word")
    if "dataset" not in typed and "val_dataset" in typed:
        # The facts of a run are learnt from its data; here that is what is evaluated on.
        typed["dataset"] = Typed(typed["val_dataset"].value[:1], "val_dataset")
    typed["output_dir"] = parsed.typed.get("output_dir", Typed(str(directory), "the first word"))
    if typed.get("eval_strategy", Typed("no", "")).value == "no":
        typed["eval_strategy"] = Typed("steps", "covey eval")
    return directory, resolve(typed, 1, problems)


def _output(resolved: Resolved, directory: Path) -> Path:
    """Where the results go: as typed, beside the run's checkpoints, or under runs/."""
    if resolved.sources["output_dir"] != "the first word":
        return Path(resolved.config.output_dir)
    if directory.name.startswith("checkpoint-"):
        return directory.parent / "evaluations" / directory.name
    return Path(first_free(os.path.join("runs", f"eval-{directory.resolve().name}")))


def _refuse(resolved: Resolved, facts: object, found: Sequence[Problem]) -> None:
    errors = [
        p
        for p in (*resolved.problems, *found)
        if p.severity is Severity.ERROR and not p.code.startswith(_IRRELEVANT)
    ]
    if errors:
        raise ConfigError(errors)


def _nameless() -> Problem:
    return problem(
        "E105",
        "model",
        "`covey eval` is given no model.",
        "The first word is the directory of a model or of a checkpoint.",
        Fix(text="`covey eval DIR --val_dataset FILE --reward_funcs accuracy`"),
    )
