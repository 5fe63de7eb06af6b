"""Tells which kind of environment a class makes: covey's is given each turn, TRL's has methods that are
tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.environments.protocol import Schema, ToolFault
from covey.environments.schema import Unusable, schema_of
from covey.rewards.callee import Wants, wants_of
from covey.texts import joined, tr

_OWN = ("reset", "get_reward", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Says what covey calls of an environment, and what `reset` and `step` are passed.

    With `has_step` it is covey's: `reset(row, seed)`, `step(turn)`. Otherwise it is TRL's:
    `reset(**columns)`, and its public methods are `tools`. `seeds`: `reset` takes the seed, too. A scheduler
    of ms-swift `keeps_history`: it is given each turn, and says how the whole conversation goes on.
    """

    has_step: bool
    has_reward: bool
    seeds: bool
    keeps_history: bool = False
    columns: tuple[str, ...] = ()
    takes_all: bool = False
    tools: Mapping[str, Schema] = field(default_factory=dict)

    def arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return what `reset` is called with; a column `seed` goes before the seed in TRL's kind."""
        given = {"seed": seed} if self.seeds else {}
        if self.has_step:
            return {**given, **({"row": dict(row)} if "row" in self.columns else {})}
        return {**given, **{n: v for n, v in row.items() if self.takes_all or n in self.columns}}


SCHEDULED = Shape(has_step=True, keeps_history=True, has_reward=False, seeds=True)
"""The shape of trajectories of a scheduler."""


def shape_of(entry: str, environment: Any) -> Shape | list[ToolFault]:
    """Return the shape of an environment, or all that is wrong with it."""
    reset, kind = _method(environment, "reset"), type(environment).__name__
    if reset is None:
        words = tr("{kind} has no method `reset`, with which an episode begins", kind=kind)
        return [ToolFault(entry=entry, kind="environment", words=words)]
    step = _method(environment, "step")
    try:
        wants = wants_of(reset)
        has_step = step is not None and "turn" in wants_of(step).names
    except TypeError as error:
        words = tr("a method of {kind} {error}", kind=kind, error=error)
        return [ToolFault(entry=entry, kind="environment", words=words)]
    has_reward = _method(environment, "get_reward") is not None
    if step is not None and has_step:
        faults = _faults_of_coveys(entry, kind, wants, wants_of(step))
        shape = Shape(
            has_step=True,
            has_reward=has_reward,
            seeds=wants.includes("seed"),
            columns=("row",) if wants.includes("row") else (),
        )
        return faults or shape
    tools, faults = _tools(entry, environment)
    shape = Shape(
        has_step=False,
        has_reward=has_reward,
        seeds="seed" in wants.names,
        columns=wants.names,
        takes_all=wants.takes_all,
        tools=tools,
    )
    return faults or shape


def _faults_of_coveys(entry: str, kind: str, reset: Wants, step: Wants) -> list[ToolFault]:
    faults = []
    for method, form, wants, known in (
        ("reset", "reset(self, row, seed)", reset, ("row", "seed")),
        ("step", "step(self, turn)", step, ("turn",)),
    ):
        unknown = tuple(n for n in wants.demands if n not in known)
        if unknown:
            words = tr(
                "{kind}.{method} demands {names}, but it is called as `{form}`",
                kind=kind,
                method=method,
                names=joined(", ", unknown),
                form=form,
            )
            faults.append(ToolFault(entry=entry, kind="environment", words=words, lacking=unknown))
    return faults


def _tools(entry: str, environment: Any) -> tuple[dict[str, Schema], list[ToolFault]]:
    """Return the public methods by name, in the order of the alphabet as TRL has them."""
    kind = type(environment)
    tools: dict[str, Schema] = {}
    faults = []
    for name in sorted(dir(kind)):
        # A property is not read: that would run users' code.
        if name.startswith("_") or name in _OWN or isinstance(inspect.getattr_static(kind, name), property):
            continue
        method = getattr(environment, name, None)
        if not inspect.ismethod(method):
            continue
        try:
            tools[name] = schema_of(method)
        except Unusable as error:
            fault = error.fault
            words = tr(
                "the method {method} of {kind} is a tool of the model, but {words}; give its name a leading "
                "underscore where it is none",
                method=name,
                kind=kind.__name__,
                words=fault.words,
            )
            faults.append(ToolFault(entry=entry, kind=fault.kind, words=words, lacking=fault.lacking))
    return tools, faults


def _method(environment: Any, name: str) -> Callable[..., Any] | None:
    found = getattr(environment, name, None)
    return found if callable(found) else None
