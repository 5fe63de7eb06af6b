"""llama3_json: the answer is a JSON object with `name` and `parameters`, and no mark around it.

Written by the templates of Llama 3.1 and later, which take one call a turn; models write several with `;`
between them, and `<|python_tag|>` in front of some:

    {"name": "calculate", "parameters": {"expression": "2*3"}}

An answer that is JSON and begins with `{"name":` cannot be told from a call, and is read as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.call_format import CallFormat, Parsed, name_and_arguments, read_calls, read_json
from covey.types import ToolCall

# Without the tag calls are first in the answer, one directly behind the other.
_OPENS = re.compile(
    r'[\s;]*((?=\{\s*"(?:name"|parameters"\s*:\s*[{"]|arguments"\s*:\s*[{"]|type"\s*:\s*"function")))'
)
_TAG = re.compile(r"(<\|python_tag\|>)")
_END_OF_FAULT = re.compile(r"\Z")


def _parse(text: str) -> Parsed:
    return read_calls(text, _mark, _read, _END_OF_FAULT)


def _mark(text: str, at: int) -> re.Match[str] | None:
    return _OPENS.match(text, at) or _TAG.search(text, at)


def _read(text: str, at: int) -> tuple[str, Mapping[str, Any], int]:
    call, at = read_json(text, at)
    return *name_and_arguments(call), at


def _write(calls: Sequence[ToolCall]) -> str:
    return "; ".join(
        json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False) for call in calls
    )


LLAMA3_JSON = CallFormat(name="llama3_json", parse=_parse, write=_write)
