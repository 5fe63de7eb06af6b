"""In a worker: the requests of a scheduler's trajectories, to the room that makes them.

{"do": "load", "scheduler": {"name": "gym_scheduler", "plugins": ["envs.py"], …}}
    {"shape": {…}}, or {"unusable": [{"kind": "missing", …}]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from covey.environments.environment_worker import Send, packed_answer
from covey.environments.scheduler_room import SchedulerRoom, SchedulerSettings
from covey.environments.shape import Shape
from covey.environments.swift.offers import offers
from covey.environments.tool import Limits, packed_faults, unloadable
from covey.rewards import swift_standin
from covey.rewards.loading import Loader, Unloadable


class SchedulerWorker:
    """Answers requests of trajectories."""

    def __init__(self, loader: Loader, limits: Limits, end: Callable[[str], None]) -> None:
        self._loader = loader
        self._room = SchedulerRoom(limits, end)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the plugin files, and make the scheduler."""
        settings = SchedulerSettings(**request["scheduler"])
        swift_standin.offer(offers())
        try:
            for file in settings.plugins:
                self._loader.run_plugin(file)
        except Unloadable as fault:
            return packed_faults([unloadable(fault)])
        found = self._room.load(settings)
        return {"shape": asdict(found)} if isinstance(found, Shape) else packed_faults(found)

    def begin(self, request: Mapping[str, Any], send: Send) -> None:
        """Begin what is answered when it is done."""
        room, key = self._room, request.get("key", 0)

        def tell(answer: Any) -> None:
            send(packed_answer(answer))

        match request["do"]:
            case "open":
                room.open(key, request["row"], request["seed"], tell, request.get("sampling"))
            case "step":
                room.step(key, request["turn"], tell)
            case _:
                room.release(key, lambda: send({}))
