"""Whether a chat template writes what it is given: every message, every tool and every call of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.errors import RowFault, TemplateError
from covey.data.messages import MARK, Message, tool_name
from covey.data.text import TextCodec
from covey.texts import tr

# Templates may leave out what an assistant thought in earlier turns; the rest of the turn follows these.
_THOUGHTS_END = re.compile(
    r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]|<channel\|>|<\|channel\|>final<\|message\|>", re.I
)
_SHOWN = 60


class KeptCheck:
    """Compares rendered prompts with their messages; raises RowFault("lost") or RowFault("tools_lost").

    A template is first asked, once for each sequence of roles, to write messages whose texts stand nowhere
    else: a short text may stand in the prompt by chance.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._lost_of: dict[tuple[Any, ...], frozenset[int | tuple[int, int]]] = {}

    def check(
        self, text: str, messages: Sequence[Message], tools: Sequence[Message], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise for the first message, call or tool that `text` does not have."""
        lost = self._lost_by_roles(messages, tools, kwargs)
        words = _Words(text)
        for number, message in enumerate(messages):
            if number in lost or not _is_written(message, words):
                said = " ".join((message["content"] or "").split())
                shown = said if len(said) <= _SHOWN else f"{said[:_SHOWN]} ..."
                detail = tr("{role} message {shown!r}", role=message["role"], shown=shown)
                raise RowFault("lost", detail, message["role"])
            for index, call in enumerate(message.get("tool_calls") or ()):
                if (number, index) in lost or tool_name(call) not in text:
                    raise RowFault(
                        "lost",
                        tr(
                            "call of the tool {tool_name} in an assistant turn",
                            tool_name=tool_name(call),
                        ),
                    )
        for tool in tools:
            if tool_name(tool) not in text:
                raise RowFault("tools_lost", tool_name(tool))

    def _lost_by_roles(
        self, messages: Sequence[Message], tools: Sequence[Message], kwargs: Mapping[str, Any]
    ) -> frozenset[int | tuple[int, int]]:
        """The messages that are left out, by their number, and the calls, by that of the message and their
        own."""
        kind = (
            tuple(
                (m["role"], bool((m["content"] or "").strip()), len(m.get("tool_calls") or ()))
                for m in messages
            ),
            bool(tools),
            repr(sorted(kwargs.items())),
        )
        if kind not in self._lost_of:
            self._lost_of[kind] = self._asked(messages, tools, kwargs)
        return self._lost_of[kind]

    def _asked(
        self, messages: Sequence[Message], tools: Sequence[Message], kwargs: Mapping[str, Any]
    ) -> frozenset[int | tuple[int, int]]:
        texts = {
            n: f"covey asks for text {n}." for n, m in enumerate(messages) if (m["content"] or "").strip()
        }
        # The name of a tool stands among the tools, too.
        calls = {
            (n, i): f"covey_call_{n}_{i}"
            for n, m in enumerate(messages)
            for i in range(len(m.get("tool_calls") or ()))
        }
        with_texts = [{**m, "content": texts[n]} if n in texts else m for n, m in enumerate(messages)]
        with_calls = [
            {**m, "tool_calls": [_renamed(c, calls[n, i]) for i, c in enumerate(m["tool_calls"])]}
            if m.get("tool_calls")
            else m
            for n, m in enumerate(messages)
        ]
        lost: set[int | tuple[int, int]] = set()
        for marks, marked in ((texts, with_texts), (calls, with_calls)):
            if not marks:
                continue
            try:
                text = self._codec.render(marked, tools=tools, kwargs=kwargs)
            except TemplateError:
                continue
            lost |= {key for key, mark in marks.items() if mark not in text}
        return frozenset(lost)


def _renamed(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": name}}


class _Words:
    """A prompt, and the same without spaces, which templates strip and join."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._bare: str | None = None

    def have(self, part: str) -> bool:
        """Whether a text stands in the prompt, as it is or between the quotes of JSON."""
        part = part.strip()
        if part in self.text:
            return True
        if self._bare is None:
            self._bare = "".join(self.text.split())
        ways = (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1])
        return any("".join(way.split()) in self._bare for way in ways)


def _is_written(message: Message, words: _Words) -> bool:
    content = message["content"] or ""
    if all(map(words.have, content.split(MARK))):
        return True
    if message["role"] != "assistant":
        return False
    visible = _THOUGHTS_END.split(content)[-1]
    return visible != content and words.have(visible)
