"""Facts about the rollout function: whether it loads, and can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.targets import target_of
from covey.texts import tr
from covey.types.turns import ToolFault


def with_rollout_function(
    facts: Facts, config: Config, functions: Mapping[str, Any]
) -> tuple[Facts, Callable[..., Any] | None]:
    """Return the facts with what stands against the rollout function, and the function itself, loaded in this
    process, which calls it; None where there is none or it cannot be used."""
    name = config.rollout_func
    if name is None:
        return facts, None
    function, fault = _found(name, functions)
    if fault is not None:
        facts = replace(facts, tools=replace(facts.tools, rollout_func=fault))
        return facts, None
    return facts, function


def _found(name: str, functions: Mapping[str, Any]) -> tuple[Callable[..., Any] | None, ToolFault | None]:
    function, target = functions.get(name), target_of(name)
    if function is None and target is None:
        words = tr("it is neither FILE.py:NAME nor package.module.name, nor an object of this program")
        return None, ToolFault(entry=name, kind="missing", words=words)
    if function is None:
        assert target is not None
        try:
            function = Loader((), {}).attribute(target)
        except Unloadable as error:
            return None, ToolFault(entry=name, kind=error.kind, words=str(error))
    if words := _unfit(function):
        return None, ToolFault(entry=name, kind="signature", words=words)
    return function, None


def _unfit(function: Any) -> str:
    """Return why something cannot be called with prompts and a trainer; "" where it can."""
    if not callable(function):
        return tr("it is a {kind}, not a function", kind=type(function).__name__)
    if inspect.iscoroutinefunction(function):
        return tr("it is an async def; call asyncio.run() in a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""
    try:
        signature.bind(None, None)
    except TypeError as error:
        return tr("it is called as rollout_func(prompts, trainer), and Python says: {error}", error=error)
    return ""
