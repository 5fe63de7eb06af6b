"""Live objects that a configuration names and nobody has given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.checks.check import Check
from covey.checks.objects.codes import CODES
from covey.config.objects import bare_name, is_live, is_stream, live_kind
from covey.options.schema import Config
from covey.plan.facts import LaunchFacts
from covey.plan.problem import problem
from covey.texts import joined, tr
from covey.types import Fix, Problem

_SAVED = {
    "model": tr(
        "save it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, then use --model DIR"
    ),
    "dataset": tr("save the rows, one JSON object on each line, then use --dataset FILE.jsonl"),
    "val_dataset": tr("save the rows, one JSON object on each line, then use --val_dataset FILE.jsonl"),
}
# A checkpoint of LoRA names the object as its base.
_ADAPTER = Fix(
    text=tr("for a LoRA checkpoint: `covey export CHECKPOINT --merge --base DIR`, then use that model")
)


def object_problems(config: Config, launch: LaunchFacts) -> list[Problem]:
    """Return a problem for each object that the program is to give and that is not there, and for each stream
    where a table is needed."""
    named = {"model": [config.model], "dataset": config.dataset, "val_dataset": config.val_dataset}
    return [*_missing(named, launch), *_streams(config)]


def _missing(named: Mapping[str, Sequence[str]], launch: LaunchFacts) -> list[Problem]:
    return [
        problem(
            "E376",
            option,
            tr(
                "{option} is {text}, a Python object that this process does not have.",
                option=option,
                text=text,
            ),
            "",
            Fix(
                text=tr(
                    "resume in a Python program that has the object: `covey.train({option}=OBJECT, ...)`",
                    option=option,
                )
            ),
            Fix(text=_SAVED[option]),
            *((_ADAPTER,) if option == "model" else ()),
        )
        for option, texts in named.items()
        for text in dict.fromkeys(texts)
        if is_live(text) and bare_name(text) not in launch.objects
    ]


def _streams(config: Config) -> list[Problem]:
    table = Fix(text=tr("load all rows into a table first: `Dataset.from_list(list(STREAM))`"))
    stream = Fix(text=tr("read rows as they are needed"), edits={"streaming": True})
    named = {} if config.streaming else {"dataset": config.dataset}
    return [
        problem(
            "E377",
            option,
            tr("{option} is {text}, an iterable dataset, but streaming is false.", option=option, text=text)
            if option == "dataset"
            else tr(
                "{option} is {text}, an iterable dataset, but an evaluation dataset is read as a whole.",
                option=option,
                text=text,
            ),
            "",
            *((stream, table) if option == "dataset" else (table,)),
        )
        for option, texts in {**named, "val_dataset": config.val_dataset}.items()
        for text in texts
        if is_stream(text)
    ]


def is_start_alone(config: Config, change: tuple[str, Any, Any]) -> bool:
    """Return whether a change is that of a live model whose weights a resume replaces and nothing else reads:
    the run trains all weights, and no KL term compares them with the first ones."""
    name, old, new = change
    is_model = name == "model" and is_live(str(old)) and is_live(str(new))
    has_reference = config.beta or config.beta_end
    return is_model and config.tuner_type == "full" and not has_reference and live_kind(old) == live_kind(new)


def changed_objects(old: Any) -> bool:
    """Return whether the old value of an option names an object, which no command can give."""
    texts = old if isinstance(old, list | tuple) else [old]
    return any(isinstance(text, str) and is_live(text) for text in texts)


SAME_OBJECTS = Fix(
    text=tr(
        "pass the same objects as when the run started; they are compared by a checksum of the "
        "model's weights or of the rows"
    )
)
"""What to do where a resumed run is given other objects."""


def changed_functions(
    config: Config, changes: Sequence[tuple[str, Any, Any]], rewards: Sequence[str] | None
) -> list[str]:
    """Return the names of functions of a program among the former rewards, which no command can give:
    neither built in, nor in a file or a package, nor of a plugin."""
    if rewards is None or config.external_plugins:
        return []
    former = next((old for name, old, _ in changes if name == "reward_funcs"), None) or ()
    return [name for name in former if name.isidentifier() and name not in rewards]


def same_functions(names: Sequence[str]) -> Fix:
    """What to do where a resumed run is given other functions of a program."""
    text = tr(
        "pass the same functions in reward_funcs as when the run started: {names}", names=joined(", ", names)
    )
    return Fix(text=text)


CHECK = Check(place=10, judge=lambda config, facts, _: object_problems(config, facts.launch), codes=CODES)
