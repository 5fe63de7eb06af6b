"""Turns the requests of a scheduler for one trajectory into differences to its last conversation.

A scheduler holds the conversation as messages of its own. What is sent on is the difference to the
conversation at its last request, so that the run knows which messages are the very turns that it sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from covey.data.images import blocks_of
from covey.data.messages import MARK
from covey.environments.protocol import History, Message, Opened, Stepped
from covey.errors import CoveyError
from covey.texts import joined, tr

_IMAGE = "<image>"
# What a request may change; everything else decides how tokens are drawn, which is the same for all of a run.
_FREE = ("max_tokens", "stop", "logprobs", "top_logprobs", "return_details", "stream", "seed")
# Beside messages and images, what a request of ms-swift may have.
_NOT_TAKEN = ("tools", "objects", "chat_template_kwargs", "audios", "videos")


class WrongRequest(CoveyError):
    """Says what a scheduler asked that cannot be answered."""


@dataclass(slots=True)
class SampledTurn:
    """Holds a turn as the scheduler was given it, by the `id` of its response."""

    id: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Trajectory:
    """Holds a trajectory; `tell` takes what it asks. `config` is what every request begins with."""

    tell: Callable[[Opened | Stepped], None]
    protocol: Any
    config: Any
    row_messages: Sequence[Message] = ()
    turns: list[SampledTurn] = field(default_factory=list)
    has_asked: bool = False
    # The conversation at the last request, with the turn that answered it.
    _known: list[dict[str, Any]] = field(default_factory=list)
    _reply: str = ""
    _is_over: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _answer: asyncio.Future[Mapping[str, Any]] | None = None

    async def ask(self, request: Any, config: Any) -> Any:
        """Return the response of the model; requests of one trajectory are answered one by one."""
        self._check(config)
        if others := [name for name in _NOT_TAKEN if getattr(request, name)]:
            raise WrongRequest(
                tr("the request has {names}, which covey does not read", names=joined(", ", others))
            )
        await self._lock.acquire()
        # A turn that the scheduler gives up is sampled all the same.
        return await asyncio.shield(asyncio.ensure_future(self._answered(request, config)))

    async def _answered(self, request: Any, config: Any) -> Any:
        try:
            if self._is_over:
                raise asyncio.CancelledError
            messages = [dict(message) for message in request.messages]
            if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
                messages.pop()
            limits = _limits(config)
            if self.has_asked:
                asked: Opened | Stepped = Stepped(history=self._history(messages, request.images), **limits)
            else:
                asked = self._opened(messages, request.images, limits)
            self.has_asked = True
            self._known = deepcopy(messages)
            self._answer = asyncio.get_running_loop().create_future()
            self.tell(asked)
            return self._response(await self._answer)
        finally:
            self._lock.release()

    async def end(self) -> None:
        """Take no more requests, and wait for the turn that was asked for."""
        self._is_over = True
        async with self._lock:
            pass

    def drop(self) -> None:
        """Take no more requests; a turn that was asked for does not come."""
        self._is_over = True
        if self._answer is not None:
            self._answer.cancel()

    def answer(self, turn: Mapping[str, Any]) -> None:
        """Take the turn that was asked for."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(turn)

    def _check(self, config: Any) -> None:
        own = vars(self.config)
        # What is None is left to the run.
        changed = [n for n, v in vars(config).items() if n not in _FREE and v not in (None, own.get(n))]
        if changed:
            (name, *_) = changed
            raise WrongRequest(
                tr(
                    "the request sets {name} to {value}, but the run samples with {own}: its ratios are "
                    "those of one policy",
                    name=name,
                    value=getattr(config, name),
                    own=own.get(name),
                )
            )

    def _opened(self, messages: list[dict[str, Any]], images: Sequence[Any], limits: Any) -> Opened:
        kept = _num_equal(messages, self.row_messages)
        if kept == len(messages) == len(self.row_messages):
            return Opened(**limits)
        shown = _with_images(messages, images)
        # Those of the data set stand as they are, also with their images.
        return Opened(messages=tuple(shown), kept=kept, **limits)

    def _history(self, messages: list[dict[str, Any]], images: Sequence[Any]) -> History:
        kept, known = _num_equal(messages, self._known), self._known
        shown = _with_images(messages, images)
        if kept == len(known) and len(messages) > kept:
            return History(kept=kept, messages=tuple(shown[kept:]))
        last = messages[-1] if messages else {}
        before = known[-1]["content"][: len(known[-1]["content"]) - len(self._reply)]
        is_same_turn = len(messages) == len(known) and kept >= len(known) - 1
        text = last.get("content") if is_same_turn and last["role"] == "assistant" else None
        if isinstance(text, str) and text.startswith(before):
            return History(kept=len(known) - 1, messages=(last,), goes_on=text[len(before) :])
        spoken = {
            m["content"]: n
            for n, m in enumerate(known)
            if m["role"] == "assistant" and isinstance(m.get("content"), str)
        }
        rest = [
            {"item": spoken[content]}
            if m["role"] == "assistant" and isinstance(content := m.get("content"), str) and content in spoken
            else image_message
            for m, image_message in zip(messages[kept:], shown[kept:], strict=True)
        ]
        return History(kept=kept, messages=tuple(rest), is_rewritten=True)

    def _response(self, turn: Mapping[str, Any]) -> Any:
        protocol, text, ids = self.protocol, turn["text"], [*turn["token_ids"]]
        self._reply = text
        if self._known and self._known[-1]["role"] == "assistant":
            self._known[-1]["content"] += text
        else:
            self._known.append({"role": "assistant", "content": text})
        choice = protocol.ChatCompletionResponseChoice(
            index=0,
            message=protocol.ChatMessage(role="assistant", content=text),
            finish_reason="length" if turn["finish"] == "length" else "stop",
            logprobs={"content": [{"logprob": value} for value in turn["logprobs"]]},
            token_ids=ids,
        )
        usage = protocol.UsageInfo(turn["length"], len(ids), turn["length"] + len(ids))
        response = protocol.ChatCompletionResponse(model="covey", choices=[choice], usage=usage)
        # None stands in front of a turn for which there was no room.
        if turn["length"]:
            self.turns.append(SampledTurn(str(response.id), [*ids], [*turn["logprobs"]]))
        return response


def _limits(config: Any) -> dict[str, Any]:
    """Return the limits of a turn that a request sets."""
    most, stop = config.max_tokens, config.stop or []
    is_number = most is None or (type(most) is int and most > 0)
    if not is_number or not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
        raise WrongRequest(
            tr(
                "the request sets max_tokens to {most!r:.80} and stop to {stop!r:.80}; these are a whole "
                "number above 0 and a list of strings",
                most=most,
                stop=stop,
            )
        )
    return {"max_tokens": most, "stop": tuple(stop)}


def _num_equal(messages: Sequence[Message], others: Sequence[Message]) -> int:
    pairs = enumerate(zip(messages, others, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(messages), len(others)))


def _with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages with each `<image>` as a block that holds its image."""
    waiting = iter(images)
    shown = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str) or _IMAGE not in content:
            shown.append(dict(message))
            continue
        blocks = [
            {**block, "image": next(waiting, None)} if block["type"] == "image" else block
            for block in blocks_of(content.replace(_IMAGE, MARK))
        ]
        if any(block.get("image", "") is None for block in blocks):
            raise WrongRequest(
                tr("a message has more places {mark} than the request has images", mark=_IMAGE)
            )
        shown.append({**message, "content": blocks})
    return shown


def as_swift(messages: Sequence[Message], images: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a row with `<image>` in the place of its images, and where these are: a path, an
    address, or what they hold as base64."""
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_IMAGE if block.get("type") == "image" else block.get("text", "") for block in content]
            content = "".join(parts)
        shown.append({**message, "content": content})
    return shown, [str(image["path"] or image["url"] or image["data"]) for image in images]
