"""`covey train --help`: every option by group, with its default and its other names, from the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.cli.layout import TAKEN
from covey.config.foreign import PLAN_WORDS
from covey.config.names import ALIASES
from covey.config.values import kind_of
from covey.options.schema import GROUPS, OPTIONS, REQUIRED, default_of, doc_of, group_of, rule_of
from covey.plan.words import flags, wrapped

_USAGE: Mapping[str, str] = {
    "train": """\
usage: covey train [CONFIG.yaml] --option value ...

  covey train --model DIR --dataset train.jsonl --reward_funcs accuracy format
  covey train runs/my-run/config.yaml --learning_rate 5e-6 --output_dir runs/my-run-2

CONFIG.yaml holds the same names, flat or under the headings below; flags override it. A list takes several
words, a repeated flag replaces, a switch is --x, --x true, --x false or --no_x.
""",
    "rlhf": """\
usage: covey rlhf --rlhf_type grpo --option value ...

The options of `covey train`, under the defaults of ms-swift that decide the result:
""",
    "plan": """\
usage: covey plan [CONFIG.yaml] --option value ... [--json]

The options of `covey train`, or after --rlhf_type grpo those of `covey rlhf`. Nothing is written, no weights
are read, and hubs are not asked: models and data are those on this machine. --json prints one object.

A machine that is not here, by these words; a model's config.json and tokenizer are enough for it. It is a
forecast: `covey train` has one process or DDP.

""",
    "eval": """\
usage: covey eval MODEL_OR_CHECKPOINT --val_dataset FILE ... [--option value ...]

Samples and scores the prompts as an evaluation during training does, prints the metrics, and writes eval.json
with every completion. A checkpoint of a run brings the run's options; flags override them. The options that
matter are those of the groups Data, Rewards, Sampling and Evaluation.
""",
    "quickstart": """\
usage: covey quickstart [--option value ...]

The options of `covey train`, over these values:
""",
}

_OTHERS = "With --plan_gpus also, as in TRL and ms-swift: " + " ".join(f"--{name}" for name in TAKEN)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether --help or -h is among the words."""
    return "--help" in argv or "-h" in argv


def help_text(verb: str, values: Mapping[str, Any] | None = None) -> str:
    """Return the help of a verb; `values` are those that it puts in the place of defaults."""
    lines = [_USAGE[verb]]
    if verb == "plan":
        lines += [f"  --{name}\n{wrapped(words, '      ')}" for name, words in PLAN_WORDS.items()]
        lines.append("\n" + wrapped(_OTHERS, "      ") + "\n")
    if values:
        lines += [f"  {flags({name: value})}" for name, value in values.items()] + [""]
    for group, heading in GROUPS.items():
        lines += [heading, ""]
        lines += [_option(name, (values or {}).get(name)) for name in OPTIONS if group_of(name) == group]
        lines.append("")
    return "\n".join(lines)


def _option(name: str, value: Any) -> str:
    lines = [f"  --{name} {kind_of(name).placeholder}", wrapped(doc_of(name), "      ")]
    lines.append(wrapped(_default(name, value), "      "))
    aliases = [alias for alias, option in ALIASES.items() if option == name]
    if aliases:
        lines.append(wrapped("also: " + ", ".join(f"--{alias}" for alias in aliases), "      "))
    return "\n".join(lines)


def _default(name: str, value: Any) -> str:
    if value is not None:
        return f"default here: {_words(name, value)}"
    if name in REQUIRED:
        return "required"
    if rule_of(name):
        return f"default: {rule_of(name)}"
    default = default_of(name)
    return "default: not set" if default is None else f"default: {_words(name, default)}"


def _words(name: str, value: Any) -> str:
    return flags({name: value}).partition(" ")[2]
