"""The trial of a chat template in a process with limits.

A template is a program. It may never end or use up all memory, and the process that renders it cannot stop
it. `python -m covey.data.template_trial` is a separate process with limits: it reads one JSON object with the
template and the arguments to render it with, and its exit code says whether a limit was exceeded. An error
that the template raises is no fault of the trial; it comes again, and is reported, at the real rendering.
"""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from covey.data.errors import TemplateError
from covey.data.messages import Message
from covey.data.template import OWN_TEMPLATES, compiled
from covey.texts import tr

_CPU_S = 3
# A process that waits takes no time of the CPU; a busy machine has few seconds for each.
_WALL_S = 60
_MEMORY_BYTES = 1 << 30
# What a template adds to its messages: a list of tools, a system message of its own.
_MOST_ADDED = 1_000_000
_OUT_OF_MEMORY, _TOO_LONG = 3, 4
# Templates that are known to end: of the built-in model, and our own.
_KNOWN = frozenset(
    {
        "2eefca287a0f008b170ce31bc2c4dabb398a64eb74716bf64db5d9a21da50da9",
        *(hashlib.sha256(text.encode()).hexdigest() for text in OWN_TEMPLATES.values()),
    }
)
# Conversations before there are any: short ones, and one that is longer than most.
_USER, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_SYSTEM = {"role": "system", "content": "c"}
_LONG = [{**turn, "content": "word " * 200} for turn in (_USER, _ANSWER)] * 20
_FIRST: Sequence[Sequence[Mapping[str, str]]] = (
    *([_USER], [_USER, _ANSWER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ANSWER]),
    *(_LONG, _LONG[:-1], [_SYSTEM, *_LONG], [_SYSTEM, *_LONG[:-1]], [{**_USER, "content": "word " * 4_000}]),
)
_GROWTH = 4


class TemplateTrial:
    """Renders new kinds of conversations in a process with limits before the template is used on them. A
    conversation is new if no other has its shape, or if it is much longer than those that were tried."""

    def __init__(self, text: str, whose: str, given: Mapping[str, Any]) -> None:
        self._text = text
        self._whose = whose
        self._given = given
        self._largest: dict[tuple[Any, ...], int] = {}

    def try_forms(self) -> None:
        """Compile the template and render a short text, also as a list of blocks; TemplateError if that
        exceeds the limits."""
        blocks = [{"type": "text", "text": "a" * 20}]
        self._start([[{"role": "user", "content": content}] for content in ("a" * 20, blocks)])

    def start(self, as_given: Callable[[Sequence[Message]], Sequence[Message]] = list) -> None:
        """Compile the template and render common kinds of conversations, `as_given` to it; TemplateError if
        that exceeds the limits."""
        self._start([as_given(messages) for messages in _FIRST])

    def _start(self, conversations: Sequence[Sequence[Message]]) -> None:
        if hashlib.sha256(self._text.encode()).hexdigest() in _KNOWN:
            return
        self._run(
            [
                {**self._given, "messages": messages, "add_generation_prompt": opens}
                for messages in conversations
                for opens in (False, True)
            ]
        )

    def ask(self, arguments: Mapping[str, Any]) -> None:
        """Try the arguments of the next rendering, unless similar ones have passed."""
        if not self._largest:
            return
        size = self._largest.get(_kind(arguments), 0)
        if _size(arguments) > size:
            self._run([arguments])

    def _run(self, renderings: Sequence[Mapping[str, Any]]) -> None:
        asked = {"template": self._text, "renderings": renderings}
        limits = {"cpu_s": _CPU_S, "memory_bytes": _MEMORY_BYTES}
        code: int | None = None
        try:
            done = subprocess.run(
                [sys.executable, "-m", "covey.data.template_trial"],
                input=json.dumps({**asked, **limits}, default=str).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_WALL_S,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        if (words := _ending(code)) is not None:
            raise TemplateError(
                tr("{whose} cannot be used: {words}", whose=self._whose, words=words), kind="broken_template"
            )
        for rendering in renderings:
            kind = _kind(rendering)
            self._largest[kind] = max(self._largest.get(kind, 0), _GROWTH * _size(rendering))


def _kind(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    roles = frozenset(str(message.get("role")) for message in arguments["messages"])
    calls = any(message.get("tool_calls") for message in arguments["messages"])
    return roles, calls, *(name for name, value in sorted(arguments.items()) if value)


def _size(arguments: Mapping[str, Any]) -> int:
    return sum(len(str(value)) for message in arguments["messages"] for value in message.values())


def _ending(code: int) -> str | None:
    """Why the trial failed; None if it passed, or if its process could not be started."""
    if code == -signal.SIGXCPU:
        return tr("it does not finish within {seconds} s of CPU time", seconds=_CPU_S)
    if code in (_OUT_OF_MEMORY, -signal.SIGKILL):
        return tr("it takes more than {gib:g} GiB of memory", gib=_MEMORY_BYTES / (1 << 30))
    if code == _TOO_LONG:
        return tr("it adds more than {count:,} characters to the messages", count=_MOST_ADDED)
    if code < 0:
        return tr("the process that rendered it was killed by {name}", name=signal.Signals(-code).name)
    return None


def main() -> None:
    """Compile and render the template that standard input holds."""
    asked = json.loads(sys.stdin.buffer.read())
    # The second number is what a process may raise the first one to.
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        template = compiled(asked["template"], "")
        for arguments in asked["renderings"]:
            _render(template, arguments)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    except TemplateError:
        return


def _render(template: jinja2.Template, arguments: Mapping[str, Any]) -> None:
    try:
        text = template.render(**arguments)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - said where it is rendered again
        return
    if len(text) > _MOST_ADDED + 100 * len(json.dumps(arguments)):
        sys.exit(_TOO_LONG)


if __name__ == "__main__":
    main()
