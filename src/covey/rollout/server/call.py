"""Calls of a rollout server over HTTP, each with a time limit; no torch, so that a check may make them."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from covey.rollout.server.values import WireError, parsed
from covey.rollout.server.wire import JSON_BYTES, LINE_BYTES, RUN_HEADER, ServerStatus
from covey.texts import tr

_CHUNK = 1 << 16
# Seconds without traffic after which the system asks whether the other side is still there, and how often.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

FAULTS = (OSError, http.client.HTTPException, WireError)
"""What a call raises where a server does not answer, answers something else, or refuses (`Refused`)."""


class Refused(OSError):
    """An answer with a status above 399; `body` is what it said."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body if isinstance(body, dict) else {}
        said = self.body.get("error", self.body.get("detail", "no reason given"))
        # vLLM's is an object with a message.
        said = said.get("message", said) if isinstance(said, dict) else said
        super().__init__(tr("it refused with {status}: {said!s:.400}", status=status, said=said))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom to call, and as whom: `run` is the id of the run ("": none, which may only ask for the status),
    `timeout_s` how long a server may give no sign."""

    address: str
    token: str
    timeout_s: float
    run: str = ""

    def status(self, timeout_s: float | None = None) -> ServerStatus:
        """What the server says of itself."""
        return ServerStatus.of(self.get("/v1/status", timeout_s))

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """Return the JSON that a path answers."""
        with self.open("GET", path, None, timeout_s=timeout_s) as answer:
            return answer.json()

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON that a path answers to JSON, or to bytes."""
        with self.open("POST", path, body) as answer:
            return answer.json()

    def open(self, method: str, path: str, body: Any, *, timeout_s: float | None = None) -> Answer:
        """Send a call and return its answer, which is still to be read; Refused where it is none."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        connection = connect(self.address, limit)
        try:
            is_bytes = isinstance(body, bytes)
            data = body if is_bytes or body is None else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {self.token}"}
            headers |= {RUN_HEADER: self.run} if self.run else {}
            kind = "application/octet-stream" if is_bytes else "application/json"
            headers |= {"Content-Type": kind} if data is not None else {}
            connection.request(method, path, body=data, headers=headers)
            answer = Answer(connection, limit)
            if answer.response.status >= 400:
                raise Refused(answer.response.status, answer.json_or_none())
            return answer
        except BaseException:
            connection.close()
            raise


class Answer:
    """An answer that is being read; closing it ends its connection. A line has at most `line_bytes`."""

    def __init__(self, connection: http.client.HTTPConnection, limit_s: float) -> None:
        # What reads the answer takes the socket away from a connection that is to be closed.
        self._socket = connection.sock
        self._connection, self._limit_s = connection, limit_s
        self.line_bytes = LINE_BYTES
        self.response = connection.getresponse()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def hosts(self) -> tuple[str, str]:
        """Return the addresses of the connection, this side's and the other's, without ports."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def wait_for_ever(self) -> None:
        """Let reads take as long as they do; `hang_up` ends them."""
        self._socket.settimeout(None)

    def hang_up(self) -> None:
        """End the connection while another thread reads from it, which closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.response.close()
        self._connection.close()

    def is_over(self) -> bool:
        """Whether the other side has ended a connection on which it has nothing to say."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def json(self) -> Any:
        """Return the whole answer, within its time and size."""
        data, until = bytearray(), time.monotonic() + self._limit_s
        while chunk := self.response.read1(_CHUNK):
            data += chunk
            if len(data) > JSON_BYTES:
                raise WireError(tr("an answer of more than {json_bytes} bytes", json_bytes=JSON_BYTES))
            if time.monotonic() > until:
                raise TimeoutError(tr("its answer took more than {limit_s:g} s", limit_s=self._limit_s))
        return parsed(bytes(data))

    def json_or_none(self) -> Any:
        """Return the same; None where it is no JSON."""
        try:
            return self.json()
        except WireError:
            return None

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of a stream, one a line, as they come."""
        while line := self.response.readline(self.line_bytes):
            body = parsed(line)
            if not isinstance(body, dict):
                raise WireError(tr("a line that is not a JSON object: {line!r}", line=line[:60]))
            yield body


def connect(address: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to `http://HOST:PORT` or `https://HOST:PORT`, whose certificate is checked."""
    parts = urlsplit(address)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    connection.connect()
    keep_alive(connection.sock)
    return connection


def keep_alive(sock: socket.socket) -> None:
    """Have the system notice within a minute that the machine on the other side is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE:
        # Linux has all of them, other systems some.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


def address_fault(address: str) -> str | None:
    """Why text is no address of a server; None where it is one."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        return tr("it is not an address: {error}", error=error)
    if parts.username is not None or parts.password is not None:
        return tr("it must not contain a user or password")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in address):
        return tr("it does not have the form http://HOST:PORT")
    if parts.path.rstrip("/") or parts.query or parts.fragment or port == 0:
        return tr("it has more parts than http://HOST:PORT")
    return None


def read_token(path: str) -> str:
    """Return the token in a file; OSError where it cannot be read, WireError where it holds none."""
    words = Path(expanduser(path)).read_text(encoding="ascii", errors="replace").split()
    if len(words) != 1 or not words[0].isprintable():
        raise WireError(tr("the file has {num_words} words instead of one token", num_words=len(words)))
    return words[0]


def words_of(error: BaseException) -> str:
    """What a failed call says, in words."""
    if isinstance(error, TimeoutError):
        return tr("it did not respond in time ({error})", error=error)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Refused | WireError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text:.300}"
