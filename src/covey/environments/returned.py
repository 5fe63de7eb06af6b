"""Reads the values that environments return: `reset` of both kinds, `step`, and `get_reward`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.protocol import Message, Opened, Schema, Stepped
from covey.environments.schema import Unusable, schema_of
from covey.environments.shape import Shape
from covey.errors import CoveyError
from covey.rewards.callee import number_of
from covey.texts import tr

_ROLES = ("user", "tool", "system", "developer", "assistant")
_KEYS = frozenset(("messages", "done", "reward"))


class WrongReturn(CoveyError):
    """Says what a method returned that it may not, in words that go on from its name."""


def read_reset(shape: Shape, value: Any) -> Opened:
    """Read what `reset` returned."""
    if not shape.has_step:
        is_content = isinstance(value, list) and all(isinstance(block, Mapping) for block in value)
        if value is not None and not isinstance(value, str) and not is_content:
            raise _wrong(value, tr("None, text, or a list of content blocks"))
        return Opened(added=value, tools=tuple(shape.tools.values()))
    if value is None:
        return Opened()
    is_pair = isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], Mapping)
    messages, tools = value if is_pair else (value, ())
    expected = tr("messages, or messages and tools")
    read = None if messages is None else _messages(messages, expected, value)
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise _wrong(value, expected)
    return Opened(messages=read, tools=tuple(_schema(tool, value) for tool in tools or ()))


def read_step(value: Any) -> Stepped:
    """Read what `step` returned."""
    expected = tr(
        "messages; with them whether it is over, and a reward; or an object of messages, done and reward"
    )
    if isinstance(value, Mapping):
        if not value.keys() <= _KEYS:
            raise _wrong(value, expected)
        messages, done, reward = value.get("messages"), value.get("done", False), value.get("reward")
    elif isinstance(value, tuple) and 2 <= len(value) <= 3 and not isinstance(value[0], Mapping):
        messages, done, reward = (*value, None)[:3]
    elif value is None:
        raise _wrong(value, expected)
    else:
        messages, done, reward = value, False, None
    if type(done).__name__ not in ("bool", "bool_") or isinstance(reward, bool):
        raise _wrong(
            value, tr("(messages, done, reward) with True or False for done, a number as the reward")
        )
    read = () if messages is None else _messages(messages, expected, value)
    if not read and not done:
        raise _wrong(value, tr("messages, since the episode is not over,"))
    return Stepped(messages=read, is_done=bool(done), reward=read_reward(reward))


def read_reward(value: Any) -> float | None:
    """Read a reward: a finite number, or None."""
    if value is None:
        return None
    number = number_of(value)
    if number is None or not math.isfinite(number):
        raise _wrong(value, tr("a finite number or None as the reward"))
    return number


def _messages(value: Any, expected: str, whole: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list | tuple):
        raise _wrong(whole, expected)
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise _wrong(message, tr("messages, each an object with a role (user, tool, system) and content"))
    return tuple(dict(message) for message in value)


def _schema(tool: Any, whole: Any) -> Schema:
    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise _wrong(whole, tr("tools that are schemas or functions"))
    try:
        return schema_of(tool)
    except Unusable as error:
        raise WrongReturn(tr("returned a tool without a schema: {words}", words=error.fault.words)) from error


def _wrong(value: Any, expected: str) -> WrongReturn:
    try:
        shown = f"{value!r:.80}"
    except Exception:  # noqa: BLE001 - the `__repr__` of an object is somebody's code, too
        shown = type(value).__name__
    return WrongReturn(tr("returned {shown} where {expected} were expected", shown=shown, expected=expected))
