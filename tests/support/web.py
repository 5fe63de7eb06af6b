"""HTTP servers in threads of the test's own process, for what covey calls over the network."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Reads requests with JSON, answers with JSON or bytes, and says nothing on the terminal."""

    def read_json(self) -> Any:
        """The body; {} where there is none."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

    def answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer; of HEAD without its body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """The address of a server, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
