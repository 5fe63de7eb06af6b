"""A service on this machine that answers as an OpenAI-compatible one does, and notes what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.web import Handler, listening

Answer = Callable[[str, int], tuple[int, Any]]


class Service:
    """Answers with what `answer(question, times)` gives, a status and an answer's text (or a whole body),
    after `delay_s`; `times` is how often this question was asked before."""

    def __init__(self, answer: Answer, delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.url = ""
        self._now = 0
        self._lock = threading.Lock()

    def take(self, request: dict[str, Any], key: str | None) -> tuple[int, Any]:
        question = request["messages"][-1]["content"]
        with self._lock:
            times = sum(r["messages"] == request["messages"] for r in self.requests)
            self.requests.append(request)
            self.keys.append(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        time.sleep(self.delay_s)
        with self._lock:
            self._now -= 1
        return self.answer(question, times)


def completion(text: Any) -> dict[str, Any]:
    """The body of an answer with this text."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@contextmanager
def serving(answer: Answer, delay_s: float = 0.0) -> Iterator[Service]:
    """The service, at `service.url` until the block ends."""
    service = Service(answer, delay_s)

    class Answers(Handler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            status, body = service.take(self.read_json(), self.headers["authorization"])
            if status == 200 and (body is None or isinstance(body, str)):
                body = completion(body)
            self.answer(status, body, {"content-type": "application/json"})

    with listening(Answers) as address:
        service.url = f"{address}/v1"
        yield service
