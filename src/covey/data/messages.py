"""Messages as chat templates take them, from every form in which data sets write them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.errors import RowFault

Message = Mapping[str, Any]

MARK = "\U000f1a6e"
"""Stands for an image in a text: a character for private use."""

# The roles that a message may have, and what other tools call them.
_USER = ("user", "human")
_ASSISTANT = ("assistant", "gpt", "bot")
_TOOL = ("tool", "function_response", "observation", "observations", "tool_response")
_CALL = ("function_call", "tool_call")
_AS_THEY_ARE = ("system", "developer", "function", "ipython")
ROLES: Mapping[str, str] = {
    **dict.fromkeys(_USER, "user"),
    **dict.fromkeys(_ASSISTANT, "assistant"),
    **dict.fromkeys(_TOOL, "tool"),
    **dict.fromkeys(_CALL, "call"),
    **{role: role for role in _AS_THEY_ARE},
}

_IMAGE_PARTS = ("image", "image_url", "input_image")
_MEDIA_PARTS = (*_IMAGE_PARTS, "video", "video_url", "audio", "audio_url", "input_audio")


class Marks:
    """Puts a mark into a text in the place of each image, and keeps what each names: None for one that is to
    be found elsewhere."""

    def __init__(self, mark: str, written: str) -> None:
        self._mark, self._written = mark, written
        self.named: list[Any] = []

    def in_text(self, text: str) -> str:
        """Return a text with a mark for each place that it writes for an image."""
        if self._mark in text:
            raise RowFault("image", repr(self._mark))
        self.named += [None] * text.count(self._written)
        return text.replace(self._written, self._mark)

    def of_part(self, part: Mapping[str, Any]) -> str:
        """Return the mark of a part of a message that is an image."""
        has_value = any(part.get(name) is not None for name in (*_IMAGE_PARTS, "url", "path", "base64"))
        self.named.append(part if has_value else None)
        return self._mark


def messages_of(value: Any, marks: Marks | None = None) -> list[dict[str, Any]]:
    """The messages of a list in any known form, each with a known role and a text.

    Known are `role`/`content`, ShareGPT's `from`/`value`, and pairs as `{"human": …, "assistant": …}`. A turn
    that calls a tool becomes an assistant's turn with `tool_calls`. With `marks` images have a place in the
    text. RowFault says what: `wrong_type`, `role`, `image` or `media`.

    >>> messages_of([{"from": "human", "value": "Hi"}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(value, Mapping):
        value = _turned(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RowFault("wrong_type")
    messages: list[dict[str, Any]] = []
    for turn in value:
        if not isinstance(turn, Mapping):
            raise RowFault("wrong_type")
        calls = _calls_alone(turn)
        if calls and messages and messages[-1]["role"] == "assistant":
            # Templates have the calls in the turn that speaks before them.
            calls = [*messages[-1].get("tool_calls", ()), *calls]
            messages[-1] = {**messages[-1], "tool_calls": calls}
        elif calls:
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            messages += _pair(turn, marks) or [_message(turn, marks)]
    return messages


def _turned(lists: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of `{"role": […], "content": […]}`, as older tables hold a list of objects; else None."""
    if not lists or not all(isinstance(values, list) for values in lists.values()):
        return None
    if len({len(values) for values in lists.values()}) > 1:
        return None
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def parsed(text: str) -> Any:
    """What a text of JSON, or of a Python list or dict, stands for; None where it is neither.

    A table in CSV holds lists as such a text.
    """
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def written_messages(text: str) -> list[Any] | None:
    """The list of messages that a text stands for, or None where it is any other text."""
    value = parsed(text)
    is_list = isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value)
    return value if is_list and all(_key(turn, "role", "from") or _pair(turn) for turn in value) else None


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The tools of a row as templates take them: a list of `{"type": "function", "function": {…}}`.

    They may be JSON text, whole or one by one, and bare functions. Fields without a value, which tables add
    to all of them, are dropped.
    """
    value = _decoded(value)
    tools = [_decoded(tool) for tool in (value if isinstance(value, list) else [value])]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowFault("tools")
    return [_tool(without_padding(tool)) for tool in tools]


def chosen_tools(value: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return those of `tools` that a row names, by their names or by whole functions of these names.

    Raises RowFault("unknown_tool") for another name.
    """
    value = _decoded(value) or value
    entries = [_decoded(one) or one for one in (value if isinstance(value, list) else [value])]
    by_name = {tool_name(tool): tool for tool in tools}
    names = [tool_name(one) if isinstance(one, Mapping) else str(one) for one in entries]
    unknown = next((name for name in names if name not in by_name), None)
    if unknown is not None:
        raise RowFault("unknown_tool", unknown)
    return tuple(by_name[name] for name in names)


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a tool, or of a call of one."""
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name") or "")


def without_padding(value: Any) -> Any:
    """A value without the fields that a table added because other rows have them."""
    if isinstance(value, Mapping):
        # None is a value of its own where a schema says what a value may be.
        return {
            k: v if k in ("default", "const", "enum", "examples") else without_padding(v)
            for k, v in value.items()
            if v is not None
        }
    return [without_padding(item) for item in value] if isinstance(value, list) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return parsed(value)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    is_bare = "type" not in tool and "function" not in tool
    wrapped = {"type": "function", "function": tool} if is_bare else tool
    if not tool_name(wrapped):
        raise RowFault("tools")
    return wrapped


def _key(turn: Mapping[str, Any], *names: str) -> str | None:
    return next((name for name in names if turn.get(name) is not None), None)


def _pair(turn: Mapping[str, Any], marks: Marks | None = None) -> list[dict[str, Any]]:
    """The two messages of `{"human": …, "assistant": …}`, or none."""
    if any(name in turn for name in ("role", "from", "content", "value")):
        return []
    asked, said = _key(turn, *_USER), _key(turn, *_ASSISTANT)
    if asked is None:
        return []
    pair = [{"role": "user", "content": turn[asked]}]
    if said is not None:
        pair.append({"role": "assistant", "content": turn[said]})
    return [_message(message, marks) for message in pair]


def _calls_alone(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a turn that is nothing else, or none."""
    if _role(turn) != "call":
        return []
    return [_call(call) for call in _listed(turn.get(_key(turn, "content", "value") or ""))]


def _role(turn: Mapping[str, Any]) -> str | None:
    """The role that a turn names, by covey's word for it; None where it names none."""
    written = turn.get(_key(turn, "role", "from") or "")
    if written is None:
        return None
    role = ROLES.get(written.strip().lower().replace("-", "_")) if isinstance(written, str) else None
    if role is None:
        raise RowFault("role", str(written))
    return role


def _message(turn: Mapping[str, Any], marks: Marks | None = None) -> dict[str, Any]:
    """A turn with a known role, whose content is one string."""
    role_key, content_key, role = _key(turn, "role", "from"), _key(turn, "content", "value"), _role(turn)
    if role is None:
        raise RowFault("wrong_type")
    content = turn.get(content_key) if content_key else None
    fields = {
        name: value
        for name, value in turn.items()
        if value is not None and name not in (role_key, content_key, "role", "from", "content", "value")
    }
    message = {"role": role, "content": _text(content, marks), **fields}
    if fields.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in _listed(fields["tool_calls"])]
        # Many templates join the content to other text.
        message["content"] = message["content"] or ""
    elif message["content"] is None:
        if role == "user":
            raise RowFault("wrong_type")
        message["content"] = ""
    return message


def _text(content: Any, marks: Marks | None) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        return content if marks is None else marks.in_text(content)
    if not isinstance(content, list | tuple):
        raise RowFault("wrong_type")
    return "".join(_part(part, marks) for part in content)


def _part(part: Any, marks: Marks | None) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if marks is not None and is_image(part):
            return marks.of_part(part)
        if isinstance(part.get("text"), str):
            return str(part["text"]) if marks is None else marks.in_text(part["text"])
        if part.get("type") in _MEDIA_PARTS or any(part.get(name) is not None for name in _MEDIA_PARTS):
            raise RowFault("media")
    raise RowFault("wrong_type")


def is_image(part: Mapping[Any, Any]) -> bool:
    """Return whether a part of a message is an image."""
    return part.get("type") in _IMAGE_PARTS or any(part.get(name) is not None for name in _IMAGE_PARTS)


def _listed(value: Any) -> list[Any]:
    value = _decoded(value)
    return value if isinstance(value, list) else [value]


def _call(call: Any) -> dict[str, Any]:
    """A call as templates take it: its arguments are a mapping, not JSON text."""
    if not isinstance(call, Mapping) or not tool_name(call):
        raise RowFault("wrong_type")
    call = without_padding(call)
    is_bare = not isinstance(call.get("function"), Mapping)
    function = dict(call if is_bare else call["function"])
    arguments = function.get("arguments", function.pop("parameters", None) if is_bare else None)
    if isinstance(arguments, str):
        decoded = parsed(arguments)
        arguments = decoded if isinstance(decoded, Mapping) else arguments
    function["arguments"] = {} if arguments is None else arguments
    return {"type": "function", "function": function} if is_bare else {**call, "function": function}
