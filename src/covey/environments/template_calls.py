"""Tells from a chat template, by rendering a call, in which format it writes calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.data.errors import TemplateError
from covey.data.text import TextCodec
from covey.environments.call_format import CallFormat
from covey.environments.call_formats.registry import CALL_FORMATS

_NAME, _ARGUMENTS = "covey_probe", {"alpha": "beta"}
_ASKED, _RESULT = "covey asks how calls are written", "covey asks how results are written"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"alpha": {"type": "string"}}, "required": ["alpha"]},
    },
}
_USER = {"role": "user", "content": _ASKED}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_ANSWER = {"role": "tool", "name": _NAME, "content": _RESULT}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFormat:
    """Says why no format reads the calls of a template.

    `no_tools`: it writes the same prompt with tools and without. `no_calls`: it refuses or leaves out the
    calls of an assistant's message, or the results in messages of role tool. `unknown_format`: no format
    reads what it writes. `written` is the text that it wrote of the turn, or the error that it raised.
    """

    kind: Literal["no_tools", "no_calls", "unknown_format"]
    written: str = ""


def format_of(codec: TextCodec) -> CallFormat | None:
    """Return the format in which the chat template writes calls of tools; None where none can be told."""
    found = format_or_reason(codec)
    return found if isinstance(found, CallFormat) else None


def format_or_reason(codec: TextCodec) -> CallFormat | NoFormat:
    """Return the format in which the chat template writes calls of tools, or why none can be told."""
    tools = (_TOOL,)
    try:
        opened = codec.render([_USER], tools=tools)
        if opened == codec.render([_USER]):
            return NoFormat(kind="no_tools")
    except TemplateError as error:
        return NoFormat(kind="no_tools", written=str(error))
    try:
        called = codec.render([_USER, _CALL], tools=tools, add_generation_prompt=False)
        answered = codec.render([_USER, _CALL, _ANSWER], tools=tools)
    except TemplateError as error:
        return NoFormat(kind="no_calls", written=str(error))
    # A format without marks needs the turn from its beginning on; one with marks reads more text as well.
    turn = called[len(opened) :] if called.startswith(opened) else called.rpartition(_ASKED)[2]
    if _NAME not in turn or _RESULT not in answered:
        return NoFormat(kind="no_calls", written=turn)
    return next(
        (each for each in CALL_FORMATS.values() if _reads_the_call(each, turn)),
        NoFormat(kind="unknown_format", written=turn),
    )


def _reads_the_call(call_format: CallFormat, turn: str) -> bool:
    calls = call_format.parse(turn).calls
    return [(call.name, dict(call.arguments), call.fault) for call in calls] == [(_NAME, _ARGUMENTS, "")]
