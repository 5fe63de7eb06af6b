"""hermes: a JSON object between `<tool_call>` and `</tool_call>`, one pair of marks a call.

Written by the templates of Hermes, Qwen 2.5 and Qwen 3:

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "2*3"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.call_format import (
    CallFormat,
    Parsed,
    UnreadableCall,
    name_and_arguments,
    read_calls,
    read_json,
)
from covey.types import ToolCall

_OPENS = re.compile(r"(<tool_call>)")
# The last mark may be missing: models leave it out, and the JSON shows that the call is whole.
_CLOSES = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_END_OF_FAULT = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")


def _parse(text: str) -> Parsed:
    return read_calls(text, _OPENS.search, _read, _END_OF_FAULT)


def _read(text: str, at: int) -> tuple[str, Mapping[str, Any], int]:
    call, at = read_json(text, at)
    name, arguments = name_and_arguments(call)
    closes = _CLOSES.match(text, at)
    if closes is None:
        raise UnreadableCall("There is text between the JSON object of the call and </tool_call>.", name)
    return name, arguments, closes.end()


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


def _json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


HERMES = CallFormat(name="hermes", parse=_parse, write=_write)
