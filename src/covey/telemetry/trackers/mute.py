"""Standard output and error without what some threads write to them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

_lock = threading.Lock()
_muted: set[int] = set()


class _Filter:
    """A stream that drops what muted threads write and passes on everything else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.get_ident() in _muted:
            return len(text)
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what the calling thread prints in this block.

    `contextlib.redirect_stdout` would silence every thread, the terminal's own among them.
    """
    with _lock:
        _muted.add(threading.get_ident())
        _install()
    try:
        yield
    finally:
        with _lock:
            _muted.discard(threading.get_ident())
            if not _muted:
                _remove()


def _install() -> None:
    if not isinstance(sys.stdout, _Filter):
        sys.stdout = _Filter(sys.stdout)  # type: ignore[assignment]
    if not isinstance(sys.stderr, _Filter):
        sys.stderr = _Filter(sys.stderr)  # type: ignore[assignment]


def _remove() -> None:
    if isinstance(sys.stdout, _Filter):
        sys.stdout = sys.stdout._stream
    if isinstance(sys.stderr, _Filter):
        sys.stderr = sys.stderr._stream
