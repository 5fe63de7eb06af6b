"""Sampling filters (top_p, top_k, min_p) of training and of evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from covey.codes import CODES
from covey.options.schema import Config, default_of
from covey.texts import tr
from covey.types import Fix, Problem

FILTERS = ("top_p", "top_k", "min_p")
"""The filters of training."""
_EVAL = "eval_"
EVAL_FILTERS = tuple(_EVAL + name for name in FILTERS)
"""The same of evaluations."""


def filters_of(config: Config) -> dict[str, Any]:
    """Return the filters that training samples with, by their options."""
    return that_filter({name: getattr(config, name) for name in FILTERS})


def eval_filters_of(config: Config) -> dict[str, Any]:
    """Return the filters that evaluations are to sample with, at whatever temperature."""
    if config.eval_strategy == "no":
        return {}
    return that_filter({name: getattr(config, name) for name in EVAL_FILTERS})


def filters_of_their_own(config: Config) -> dict[str, Any]:
    """Return the filters of evaluations that differ from those of training."""
    own = eval_filters_of(config)
    return {name: value for name, value in own.items() if value != getattr(config, name.removeprefix(_EVAL))}


def that_filter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some options of filters that leave tokens out."""
    return {name: value for name, value in values.items() if value != _off(name)}


def off(names: Iterable[str]) -> dict[str, Any]:
    """Return the edits that switch filters off."""
    return {name: _off(name) for name in names}


def _off(name: str) -> Any:
    """The value at which a filter keeps every token: its default, or that of training."""
    return default_of(name.removeprefix(_EVAL))


def filters_off(config: Config) -> dict[str, Any]:
    """Return the edits with which a configuration filters nothing."""
    return off(filters_of(config) | eval_filters_of(config))


def evaluated_alone(config: Config) -> Config:
    """Return a configuration with the filters that an evaluation without training samples with."""
    is_greedy = config.eval_temperature <= 0
    return config.model_copy(update=off((*FILTERS, *EVAL_FILTERS) if is_greedy else FILTERS))


def greedy_problem(temperature: str, filters: Mapping[str, Any]) -> Problem:
    """Return the problem of filters where an option of the temperature is 0."""
    return Problem(
        code="E111",
        option=next(iter(filters)),
        seen=tr(
            "{temperature} is 0, so the most probable token is always taken; {in_words} cannot change that.",
            in_words=in_words(filters),
            temperature=temperature,
        ),
        why=CODES["E111"].why,
        fixes=(
            Fix(text=tr("sample"), edits={temperature: 1.0}),
            Fix(text=tr("take the most probable token"), edits=off(filters)),
        ),
    )


def in_words(filters: Mapping[str, Any]) -> str:
    """Return filters with their values: `top_p 0.9, top_k 50`."""
    return ", ".join(f"{name.removeprefix(_EVAL)} {value:g}" for name, value in filters.items())
