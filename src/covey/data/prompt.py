"""One row to one prompt: the column, the system turn, the messages, and what the prompt has opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.data.errors import DataError
from covey.data.text import TextCodec

# Where a prompt is looked for, in this order; every other column goes to the rewards.
PROMPT_COLUMNS = ("prompt", "messages", "query", "question", "problem")

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")

SYSTEM_PRESETS = {
    "r1": "You answer questions. First work the question through inside <think> and </think> tags, then give "
    "the final answer inside <answer> and </answer> tags, like this: <think> your reasoning </think> "
    "<answer> your answer </answer>"
}

# An opening tag at the very end: the model goes on inside it.
_OPENED = re.compile(
    r"(?:<(?:think|thinking|thought|reasoning|answer|solution)>|\[THINK\])\s*\Z", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A row's prompt text, or the reason why it has none; `messages` is None where no template made
    the text."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any]
    reason: str = ""
    media: tuple[str, ...] = ()


def system_text(value: str) -> str:
    """The system prompt that `--system` means: a preset, the text of a file, or the words themselves."""
    if value in SYSTEM_PRESETS:
        return SYSTEM_PRESETS[value]
    path = os.path.expanduser(value)
    if os.path.isfile(path):
        return Path(path).read_text(encoding="utf-8").strip()
    if value.endswith((".txt", ".md")) and len(value.split()) == 1:
        raise DataError(f"system names a file, {value}, which is not there")
    return value


def render(row: Mapping[str, Any], codec: TextCodec, *, system: str | None, is_raw: bool) -> Rendered:
    """The prompt of a row; a `prompt` string stays as it is when `is_raw`, all else goes through the
    template."""
    media = tuple(name for name in MEDIA_COLUMNS if row.get(name))
    column = next((name for name in PROMPT_COLUMNS if not _is_empty(row.get(name))), None)
    if column is None:
        return Rendered(columns=row, reason="no_prompt", media=media)
    value = row[column]
    columns = {name: v for name, v in row.items() if name != column}
    if isinstance(value, str):
        media += (column,) if "<image>" in value else ()
        if column == "prompt" and is_raw:
            return Rendered(text=value, columns=columns, reason="media" if media else "", media=media)
        turns: Sequence[Any] = ({"role": "user", "content": value},)
    elif isinstance(value, Sequence):
        turns = value
    else:
        return Rendered(columns=columns, reason="wrong_type", media=media)
    if not all(_is_turn(turn) for turn in turns):
        return Rendered(columns=columns, reason="wrong_type", media=media)
    if any(_has_media(turn) for turn in turns):
        media += (column,)
    if media:
        return Rendered(columns=columns, reason="media", media=media)
    messages = _messages(turns)
    if all(m["role"] == "system" for m in messages):
        return Rendered(columns=columns, reason="no_prompt")
    if messages[0]["role"] != "system":
        own = row.get("system")
        if isinstance(own, str) and own.strip():
            system = columns.pop("system")
        if system:
            messages = ({"role": "system", "content": system}, *messages)
    return Rendered(text=codec.render(messages), messages=messages, columns=columns)


def opened(rendered: Rendered) -> str:
    """What the prompt has opened of the assistant's turn: `<think>\\n` where its text ends with that, else
    nothing.

    A tag that ends the last message's own text opens nothing: the template then adds no turn of the
    assistant.
    """
    match = _OPENED.search(rendered.text[-40:])
    if match is None:
        return ""
    if rendered.messages:
        last = str(rendered.messages[-1].get("content") or "")
        if rendered.text.rstrip().endswith(last.rstrip()) and last.strip():
            return ""
    return match.group()


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        return all(isinstance(part, str | Mapping) for part in content)
    return isinstance(content, str) or (content is None and turn["role"] != "user")


def _has_media(turn: Mapping[str, Any]) -> bool:
    content = turn.get("content")
    if isinstance(content, str):
        return "<image>" in content
    return any(not isinstance(p, str) and not isinstance(p.get("text"), str) for p in content or ())


def _messages(turns: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    messages = [_message(turn) for turn in turns]
    # ms-swift's data ends with the gold assistant turn; the policy writes that turn itself.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return tuple(messages)


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn whose content is one string; fields without a value, which tables add to all turns, are
    dropped."""
    message = {name: v for name, v in turn.items() if v is not None or name == "content"}
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        message["content"] = "".join(p if isinstance(p, str) else p["text"] for p in content)
    return message
