"""qwen3_xml: the name and each argument in a tag of its own.

Written by the templates of Qwen3-Coder and Qwen 3.5:

    <tool_call>
    <function=calculate>
    <parameter=expression>
    2*3
    </parameter>
    </function>
    </tool_call>

Values are text, whatever their type; the schema of the tool says what they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.call_format import CallFormat, Parsed, UnreadableCall, read_calls
from covey.types import ToolCall

# Models leave out the first mark at times.
_OPENS = re.compile(r"(<tool_call>|(?=<function=))")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
# A value ends where the next tag stands behind it, so it may hold `</parameter>` itself.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_CLOSES = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_END_OF_FAULT = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
_FORM = "A call must be <function=NAME>, <parameter=KEY>VALUE</parameter> for each argument, and </function>."


def _parse(text: str) -> Parsed:
    return read_calls(text, _OPENS.search, _read, _END_OF_FAULT)


def _read(text: str, at: int) -> tuple[str, Mapping[str, Any], int]:
    # No call reaches into the next one, so text without an end is not searched to its end again and again.
    following = text.find("<tool_call>", at)
    limit = len(text) if following < 0 else following
    function = _FUNCTION.match(text, at, limit)
    if function is None:
        raise UnreadableCall(_FORM)
    name, at = function[1].strip(), function.end()
    arguments: dict[str, str] = {}
    while (parameter := _PARAMETER.match(text, at, limit)) is not None:
        key, at = parameter[1].strip(), parameter.end()
        if key in arguments:
            raise UnreadableCall("The call gives a parameter twice.", name)
        arguments[key] = parameter[2].removeprefix("\n").removesuffix("\n")
    closes = _CLOSES.match(text, at, limit)
    if closes is None:
        raise UnreadableCall(_FORM, name)
    return name, arguments, closes.end()


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_call(call) for call in calls)


def _call(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _text(value: Any) -> str:
    # As the templates do: True, False and None are Python's words.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


QWEN3_XML = CallFormat(name="qwen3_xml", parse=_parse, write=_write)
