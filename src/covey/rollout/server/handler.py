"""Reads and writes HTTP/1.1 of the standard library as JSON, within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from covey.rollout.server.call import keep_alive
from covey.rollout.server.front import Refusal
from covey.rollout.server.values import WireError, parsed
from covey.rollout.server.wire import JSON_BYTES

# A client with the token that says nothing, or takes nothing, for so long is gone.
_SILENT_S = 60.0


class JsonHandler(BaseHTTPRequestHandler):
    """Reads the bodies of calls and writes answers; a subclass has the routes."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "covey", ""
    timeout = _SILENT_S

    def setup(self) -> None:
        super().setup()
        keep_alive(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for a call, as the library would."""

    def _body(self, limit: int) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit() or self.headers.get("Transfer-Encoding"):
            raise Refusal(411, "a body says its length in Content-Length")
        if int(text) > limit:
            raise Refusal(413, f"a body of {text} bytes; this route takes {limit}")
        data = self.rfile.read(int(text))
        if len(data) < int(text):
            raise ConnectionError("the body was cut short")
        return data

    def _json(self, *names: str) -> dict[str, Any]:
        body = parsed(self._body(JSON_BYTES))
        if not isinstance(body, dict) or not set(names) <= set(body):
            raise WireError(f"the body is an object with {', '.join(names)}")
        return body

    def _say(self, status: int, body: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        # A body that was not read would be taken for the next call.
        self.close_connection = self.close_connection or status >= 400
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _begin_lines(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()

    def _end_lines(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _wait_for_end(self) -> None:
        self.close_connection = True
        self.connection.settimeout(None)
        self.connection.recv(1)
