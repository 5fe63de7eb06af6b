"""Standard output and error without what some threads write to them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = ("stdout", "stderr")
_lock = threading.Lock()


class _Filter:
    """A stream that drops what its muted threads write and passes on everything else."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.muted: set[int] = set()

    def write(self, text: str) -> int:
        if threading.get_ident() in self.muted:
            return len(text)
        return self.stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what the calling thread prints in this block.

    `contextlib.redirect_stdout` would silence every thread, the terminal's own among them.
    """
    thread = threading.get_ident()
    with _lock:
        for name in _STREAMS:
            stream = getattr(sys, name)
            filtered = stream if isinstance(stream, _Filter) else _Filter(stream)
            filtered.muted.add(thread)
            setattr(sys, name, filtered)
    try:
        yield
    finally:
        with _lock:
            for name in _STREAMS:
                stream = getattr(sys, name)
                if isinstance(stream, _Filter):
                    stream.muted.discard(thread)
                    if not stream.muted:
                        setattr(sys, name, stream.stream)
