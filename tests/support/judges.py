"""A service on this machine that answers as an OpenAI-compatible one does, and notes what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/chat/completions"
            status, body = service.take(request, self.headers["authorization"])
            if status == 200 and (body is None or isinstance(body, str)):
                body = completion(body)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
