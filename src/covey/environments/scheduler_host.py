"""The schedulers of ms-swift of a rank, in a process of their own."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from covey.environments.environment_host import HostedEnvironments
from covey.environments.printed import Printed
from covey.environments.protocol import ToolFault
from covey.environments.remote_room import RemoteRoom
from covey.environments.scheduler_room import SchedulerSettings
from covey.environments.shape import SCHEDULED, Shape
from covey.environments.tool import Limits
from covey.rewards.workers import Workers


def start_scheduler(
    settings: SchedulerSettings, *, timeout_s: float, load_limit_s: float = 60.0
) -> tuple[HostedEnvironments | None, list[ToolFault]]:
    """Return what holds the trajectories of a scheduler, or None and all that is wrong with it. `timeout_s`
    is what it may take from a turn to its next request."""
    room, found = start_room(settings, timeout_s=timeout_s, load_limit_s=load_limit_s)
    return (None, found) if room is None else (hosted(room, settings.name), [])


def start_room(
    settings: SchedulerSettings, *, timeout_s: float, load_limit_s: float = 60.0
) -> tuple[RemoteRoom | None, list[ToolFault]]:
    """Return the process that makes the trajectories of a scheduler, or None and all that is wrong."""
    limits = Limits(timeout_s=timeout_s, max_result_chars=sys.maxsize)
    opening = {"holds": "schedulers", "limits": asdict(limits), "memory_gb": None}
    room = RemoteRoom(Workers(Printed().start_worker, opening, load_limit_s), load_limit_s)
    found = room.add_scheduler(settings)
    if isinstance(found, Shape):
        return room, []
    room.close()
    return None, found


def hosted(room: Any, name: str) -> HostedEnvironments:
    """Return what holds the trajectories of a room, wherever its process is."""
    return HostedEnvironments(room, [SCHEDULED], name, sys.maxsize)
