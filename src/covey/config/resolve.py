"""From what was typed to the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from covey.config.accelerate import take_accelerate
from covey.config.derive import (
    ACCUMULATION,
    GENERATION_BATCH,
    PER_GENERATION,
    RULES,
    derive_batch,
)
from covey.config.dialect import SOURCE, dialect_note, ms_swift_typed
from covey.config.names import nearest_option
from covey.config.output import default_output_dir
from covey.config.start import start_of
from covey.config.take import Layer, Typed, take_mapping
from covey.config.unreadable import without_unreadable
from covey.errors import ConfigError
from covey.options.schema import OPTIONS, REQUIRED, Config, default_of
from covey.options.turns import GYM_SCHEDULERS
from covey.texts import tr
from covey.types import Fix, Problem

_VARIABLES = {"MAX_PIXELS": "max_pixels", "IMAGE_MAX_TOKEN_NUM": "image_max_token_num"}
_ABSENT: dict[str, Any] = {"model": "", "dataset": [], "reward_funcs": []}
_EXAMPLES: dict[str, tuple[Any, str]] = {
    "model": ("quickstart", tr("a directory with weights, an id on a hub, or the built-in model")),
    "dataset": (["quickstart"], tr("files, directories or ids on a hub, or the built-in task")),
    "reward_funcs": (["accuracy"], tr("one or more rewards")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration, where each of its values came from, and what is wrong with what was typed.

    `other_names` are those under which options were typed that are called otherwise here.

    With problems of severity error the configuration only serves further checks: a required option that is
    missing is empty in it, and a value that could not be read is the default.
    """

    config: Config
    sources: Mapping[str, str]
    typed_names: frozenset[str]
    other_names: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def resolve(typed: Mapping[str, Typed], world_size: int, problems: Sequence[Problem] = ()) -> Resolved:
    """Return the configuration for `world_size` training processes; `problems` are those of parsing and are
    kept.

    Raises ConfigError where no configuration can be built at all, with every problem so far.
    """
    told = _of_environment(typed)
    typed, unreadable = without_unreadable({**typed, **told.typed})
    problems = [*problems, *told.problems, *unreadable]
    start = start_of(typed)
    all_problems = [*problems, *start.problems, *_missing(typed, faulty_options(problems, typed))]
    values = {name: t.value for name, t in typed.items()}
    sources = {name: t.source for name, t in typed.items()}
    for name, (value, source) in start.values.items():
        values[name], sources[name] = value, source
    if "environment_factory" in values and not (values.get("reward_funcs") or values.get("reward_model")):
        values["reward_funcs"], sources["reward_funcs"] = ["environment"], tr("default with an environment")
    _fill_scheduler(values, sources)
    typed_values = dict(values)

    def fill(name: str, value: Any, source: str) -> None:
        if name not in values:
            values[name], sources[name] = value, source

    for name, absent in _ABSENT.items():
        fill(name, absent, tr("not given"))
    batch = derive_batch(typed_values, world_size)
    for name in (ACCUMULATION, PER_GENERATION, GENERATION_BATCH):
        fill(name, getattr(batch, name), batch.sources.get(name, ""))
    if world_size > 1:
        fill("nproc_per_node", world_size, tr("derived from the number of processes"))
    for name, rule in RULES.items():
        fill(name, *rule.derive(values))
    if "output_dir" not in values:
        fill(
            "output_dir",
            *default_output_dir(values["model"], values["dataset"], values.get("resume_from_checkpoint")),
        )
    for name in OPTIONS:
        fill(name, default_of(name), "default")
    try:
        config = Config(**values)
    except ValidationError as error:
        raise ConfigError([*all_problems, *_invalid(error)]) from None
    ordered = {name: sources[name] for name in OPTIONS}
    return Resolved(
        config=config,
        sources=MappingProxyType(ordered),
        typed_names=frozenset(name for name, t in typed.items() if t.source != SOURCE),
        other_names=MappingProxyType({name: t.name for name, t in typed.items() if t.name}),
        problems=tuple(all_problems),
    )


def _fill_scheduler(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Fill in what a scheduler of ms-swift brings: its reward, and the limit of each turn."""
    scheduler = values.get("multi_turn_scheduler")
    if not scheduler:
        return
    rewards = values.get("reward_funcs") or []
    if _counts_gym(values) and "environment" not in rewards:
        values["reward_funcs"] = [*rewards, "environment"]
        sources["reward_funcs"] = tr("with the reward of the scheduler")
    if "completion_length_limit_scope" not in values and values.get("max_turns") is not None:
        values["completion_length_limit_scope"] = "per_round"
        sources["completion_length_limit_scope"] = tr("default with a scheduler")


def _counts_gym(values: Mapping[str, Any]) -> bool:
    """Return whether the total_reward of a scheduler is a reward of the run."""
    is_gym = values.get("multi_turn_scheduler") in GYM_SCHEDULERS
    counts = values.get("use_gym_env")
    return (is_gym or values.get("gym_env") is not None) if counts is None else bool(counts)


def _of_environment(typed: Mapping[str, Typed]) -> Layer:
    """Return the options that ms-swift reads from the environment and those that accelerate's launcher sets
    there, where nobody has typed them."""
    layer = Layer()
    for variable, name in _VARIABLES.items():
        if name not in typed and os.environ.get(variable):
            layer.take(name, os.environ[variable], tr("environment variable {name}", name=variable))
    take_accelerate(layer, os.environ, typed)
    return layer


def faulty_options(problems: Collection[Problem], typed: Collection[str]) -> set[str]:
    """The options that something is said about, and those that a misspelled name most likely means where they
    are not `typed` too: what follows from the values that they have without it is no problem of its own."""
    faulty = {problem.option for problem in problems}
    meant = {nearest_option(problem.option) for problem in problems if problem.code == "E101"}
    return faulty | {name for name in meant if name is not None and name not in typed}


def from_dict(options: Mapping[str, Any], world_size: int = 1) -> Resolved:
    """Return the configuration of a mapping of options under any of their names, as Python code gives it."""
    layer = take_mapping(options, "argument")
    if layer.is_ms_swift:
        problems = [*layer.problems, dialect_note(layer.typed)]
        return resolve(ms_swift_typed(layer.typed), world_size, problems)
    return resolve(layer.typed, world_size, layer.problems)


def _missing(typed: Mapping[str, Typed], faulty: set[str]) -> list[Problem]:
    problems = []
    for name in REQUIRED:
        if (name in typed and typed[name].value) or name in faulty:
            continue
        others = ("reward_model", "environment_factory")
        counts = _counts_gym({n: t.value for n, t in typed.items()})
        if name == "reward_funcs" and (counts or any(n in typed and typed[n].value for n in others)):
            continue
        example, words = _EXAMPLES[name]
        problems.append(
            Problem(
                code="E105",
                option=name,
                seen=tr("{name} is not given.", name=name),
                why=tr(
                    "A run needs a model, a data set and at least one reward, and none of them has a default."
                ),
                cause=tr("The option is neither on the command line nor in the configuration file."),
                fixes=(Fix(text=words, edits={name: example}),),
            )
        )
    return problems


def _invalid(error: ValidationError) -> list[Problem]:
    return [
        Problem(
            code="E103",
            option=".".join(str(part) for part in detail["loc"]),
            seen=f"{detail['input']!r}: {detail['msg']}.",
            why=tr("The value does not have the type of the option."),
            cause=tr("A program passed the value directly, without the option parser."),
            fixes=(Fix(text=tr("`covey train --help` says what each option takes")),),
        )
        for detail in error.errors()
    ]
