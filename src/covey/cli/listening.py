"""Where the processes below one of this machine listen, as Linux has it in /proc."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def listening(parent: int) -> dict[str, list[int]]:
    """Return the ports by address that the processes below `parent` listen on; on Linux alone."""
    return ports_of(processes_below(parent))


def ports_of(processes: Iterable[int]) -> dict[str, list[int]]:
    """Return the ports by address that these processes listen on; on Linux alone."""
    sockets = _sockets(processes)
    found: dict[str, set[int]] = {}
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and words[9] in sockets:
                    address, port = words[1].split(":")
                    found.setdefault(_address(address), set()).add(int(port, 16))
    return {address: sorted(ports) for address, ports in found.items()}


def processes_below(parent: int) -> list[int]:
    """The processes that `parent` has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            children.setdefault(int(words.split()[1]), []).append(int(directory.name))
    found, ahead = [], [parent]
    while ahead:
        own = children.get(ahead.pop(), [])
        found += own
        ahead += own
    return found


def _sockets(processes: Iterable[int]) -> set[str]:
    """The numbers of the sockets that processes hold open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(entry)
                    if target.startswith("socket:["):
                        found.add(target[len("socket:[") : -1])
    return found


def _address(text: str) -> str:
    """An address as Linux writes it, in words of four bytes of which the last comes first."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if not any(raw):
        return "all addresses"
    name = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return name.removeprefix("::ffff:")
