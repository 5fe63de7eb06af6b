"""Connections that have not shown the token: few, and each for a short time.

Whoever reaches the port of a server can open connections. Each of them takes a file and a thread, so they are
bounded before anything is read from them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

MOST = 256
"""Connections without the token; one more ends the oldest of them."""
LONGEST_S = 10.0
"""How long a connection may take to show the token, handshake of TLS included, however it spends them."""

# Why a connection cannot be accepted where the process or the machine has nothing left for it.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def is_full(error: OSError) -> bool:
    """Whether accepting failed because no files or memory are left; the connection is still waiting then."""
    return error.errno in _FULL


class Unproven:
    """The connections of a server that have not shown the token. Any thread may call any method."""

    def __init__(self, *, most: int = MOST, longest_s: float = LONGEST_S) -> None:
        self._most, self._longest_s = most, longest_s
        self._lock = threading.Lock()
        # When each was accepted, the oldest first.
        self._since: dict[socket.socket, float] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._since)

    def add(self, connection: socket.socket) -> None:
        """Count a new connection; where that is one too many, the oldest ends."""
        with self._lock:
            self._since[connection] = time.monotonic()
            if len(self._since) > self._most:
                self._end_oldest()

    def remove(self, connection: socket.socket) -> None:
        """Count a connection no longer: it has shown the token, or is about to be closed."""
        with self._lock:
            self._since.pop(connection, None)

    def end_older_half(self) -> None:
        """End the older half of the connections."""
        with self._lock:
            for _ in range((len(self._since) + 1) // 2):
                self._end_oldest()

    def end_late(self) -> None:
        """End those that have had their time."""
        until = time.monotonic() - self._longest_s
        with self._lock:
            while self._since and next(iter(self._since.values())) <= until:
                self._end_oldest()

    def _end_oldest(self) -> None:
        connection = next(iter(self._since))
        del self._since[connection]
        # Its thread reads the end and closes it. A socket of TLS has a shutdown of its own, which would take
        # the session away from that thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
