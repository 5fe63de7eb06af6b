"""Defines a format of tool calls, and reads the parts that all formats share.

Faults are sentences that are sent back to the model, so they are English whatever language covey speaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.data.plain import is_encodable
from covey.types import ToolCall

# Deeper values meet the recursion limit of what writes them as JSON.
_DEEPEST = 64
# Thoughts in front of the answer; one that is not closed is all of the text.
_THOUGHTS = re.compile(
    r"(?:\s*(?:<(think|thinking)>.*?(?:</\1>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)))*", re.DOTALL
)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The text of a turn without its calls, and the calls in order.

    Without calls `content` is the text as it is; with calls, what stands around them, stripped. Thoughts
    belong to the content.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Declares a format; a variable of a file in `call_formats` that holds one registers it.

    parse  reads a turn and never raises. Its text is what the template opened of the turn and what the model
           wrote, decoded with special tokens, which may be the marks of calls (`<|python_tag|>` of Llama,
           `<tool_call>` of some), but without the token that ended the turn. Calls within a thought in front
           are none. What opens a call and cannot be read is a call with a `fault`
    write  gives the text of calls as chat templates of this format write them
    """

    name: str
    parse: Callable[[str], Parsed]
    write: Callable[[Sequence[ToolCall]], str]


class UnreadableCall(Exception):
    """Says in one sentence why a text that opens a call is none; `name` is the tool, where it can be read."""

    def __init__(self, words: str, name: str = "") -> None:
        super().__init__(words)
        self.name = name


def read_calls(
    text: str,
    find: Callable[[str, int], re.Match[str] | None],
    read: Callable[[str, int], tuple[str, Mapping[str, Any], int]],
    end_of_fault: re.Pattern[str],
) -> Parsed:
    """Read every call of a turn.

    `find` finds the next mark of a call, as group 1, from a character on. `read` reads the call behind the
    mark: its name, its arguments, and where it ends; where it raises UnreadableCall, the text up to the end
    of `end_of_fault` is the faulty call.
    """
    thoughts = _THOUGHTS.match(text)
    at, kept_until = thoughts.end() if thoughts else 0, 0
    calls: list[ToolCall] = []
    kept: list[str] = []
    while (mark := find(text, at)) is not None:
        kept.append(text[kept_until : mark.start()])
        try:
            name, arguments, at = read(text, mark.end())
            calls.append(ToolCall(name=name, arguments=arguments, text=text[mark.start(1) : at]))
        except UnreadableCall as error:
            end = end_of_fault.search(text, mark.end())
            at = end.end() if end else len(text)
            calls.append(ToolCall(name=error.name, text=text[mark.start(1) : at], fault=str(error)))
        kept_until = at
    if not calls:
        return Parsed(content=text)
    kept.append(text[kept_until:])
    content = "\n".join(part.strip() for part in kept if part.strip())
    return Parsed(content=content, calls=tuple(calls))


def read_json(text: str, at: int = 0, name: str = "") -> tuple[Any, int]:
    """Return the JSON value that begins here, and where it ends; UnreadableCall where there is none, or where
    it could not be written again: it nests too deeply, or holds a number or a text that JSON has not."""
    space = _SPACE.match(text, at)
    start = space.end() if space else at
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _is_deep(value):
            raise UnreadableCall(f"The call nests more than {_DEEPEST} levels.", name)
        if not is_encodable(json.dumps(value, ensure_ascii=False, allow_nan=False)):
            raise UnreadableCall("The call holds half of a surrogate pair, which is no text.", name)
    except json.JSONDecodeError as error:
        words = f"The call is not valid JSON: {error.msg}, character {error.pos - start + 1} of the JSON."
        raise UnreadableCall(words, name) from error
    except RecursionError as error:
        raise UnreadableCall(f"The call nests more than {_DEEPEST} levels.", name) from error
    except ValueError as error:
        raise UnreadableCall("The call holds a number that is not finite or too long.", name) from error
    return value, end


def name_and_arguments(call: Any) -> tuple[str, Mapping[str, Any]]:
    """Return what `{"name": …, "arguments": {…}}` says; UnreadableCall where it is no call.

    `parameters` is the same as `arguments`; either may be JSON in a text, and neither means no arguments.
    """
    if not isinstance(call, dict):
        raise UnreadableCall('A call must be a JSON object with "name" and its arguments.')
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        raise UnreadableCall('The call has no "name".')
    name = name.strip()
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        written = arguments.strip() or "{}"
        arguments, end = read_json(written, name=name)
        if end < len(written):
            raise UnreadableCall("There is more than one JSON value in the arguments.", name)
    if arguments is None:
        return name, {}
    if not isinstance(arguments, dict):
        raise UnreadableCall("The arguments of a call must be a JSON object.", name)
    return name, arguments


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise UnreadableCall("The call gives a key of a JSON object twice.")
    return value


def _no_number(word: str) -> Any:
    raise ValueError(word)


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_number)


def _is_deep(value: Any) -> bool:
    layer = [value]
    for _ in range(_DEEPEST):
        nested = [item.values() if isinstance(item, dict) else item for item in layer if _holds(item)]
        layer = [inner for items in nested for inner in items]
    return bool(layer)


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)
