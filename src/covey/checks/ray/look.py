"""The Ray that a run starts its ranks in, as far as that can be known without importing Ray."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from covey.plan.facts import RayFacts
from covey.texts import tr

_ANSWER_S = 5.0
# Where `ray start` leaves the address of the Ray of a machine.
_FOLDER, _FILE = "/tmp/ray", "ray_current_cluster"


def find_ray(environment: Mapping[str, str]) -> RayFacts:
    """Return the Ray that RAY_ADDRESS names, else the one that this user has started on this machine; without
    an address where there is neither, and the run starts its own."""
    named = environment.get("RAY_ADDRESS", "").strip()
    if named == "local":
        return RayFacts()
    if named in ("", "auto"):
        address = _started_here(environment)
        if address is not None or not named:
            return RayFacts(address=address)
        return RayFacts(address=named, fault=tr("no Ray of this user runs on this machine"))
    if "://" in named:
        return RayFacts(address=named, fault=tr("it is an address of Ray Client, or of the dashboard"))
    if not re.fullmatch(r".+:\d+", named):
        return RayFacts(address=named, fault=tr("it has no port"))
    return RayFacts(address=named, fault=silence(named))


def _started_here(environment: Mapping[str, str]) -> str | None:
    path = Path(environment.get("RAY_TMPDIR", _FOLDER)) / _FILE
    try:
        # A Ray of another user would run this command as that user.
        if path.stat().st_uid != os.getuid():
            return None
        address = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return address if address and not silence(address) else None


def silence(address: str) -> str:
    """Why nobody answers at an address; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            return ""
    except (OSError, ValueError, OverflowError) as error:
        return tr("nobody answers there ({getattr})", getattr=getattr(error, "strerror", None) or error)
