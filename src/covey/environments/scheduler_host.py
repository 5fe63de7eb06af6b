"""The schedulers of ms-swift of a rank, in a process of their own."""

from __future__ import annotations

import sys
from dataclasses import asdict

from covey.environments.environment_host import HostedEnvironments
from covey.environments.printed import Printed
from covey.environments.protocol import ToolFault
from covey.environments.remote_room import RemoteRoom
from covey.environments.scheduler_room import SchedulerSettings
from covey.environments.shape import Shape
from covey.environments.tool import Limits
from covey.rewards.workers import Workers


def start_scheduler(
    settings: SchedulerSettings, *, timeout_s: float, load_limit_s: float = 60.0
) -> tuple[HostedEnvironments | None, list[ToolFault]]:
    """Return what holds the trajectories of a scheduler, or None and all that is wrong with it. `timeout_s`
    is what it may take from a turn to its next request."""
    limits = Limits(timeout_s=timeout_s, max_result_chars=sys.maxsize)
    opening = {"holds": "schedulers", "limits": asdict(limits), "memory_gb": None}
    room = RemoteRoom(Workers(Printed().start_worker, opening, load_limit_s), load_limit_s)
    found = room.add_scheduler(settings)
    if not isinstance(found, Shape):
        room.close()
        return None, found
    return HostedEnvironments(room, [found], settings.name, sys.maxsize), []
