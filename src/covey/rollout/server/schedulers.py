"""The scheduler of a rollout server: its trajectories for the runs that use the server, in a process of its
own."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from covey.environments.channel import Answer
from covey.environments.remote_room import RemoteRoom
from covey.environments.scheduler_room import SchedulerSettings
from covey.rewards.process import WorkerGone
from covey.rollout.server.values import WireError
from covey.texts import packed, tr

_DOES = ("open", "step", "release")


@dataclass(slots=True)
class ServedScheduler:
    """Makes trajectories of the scheduler of `settings`. A client names its trajectories itself; those of one
    that is gone are released."""

    settings: SchedulerSettings
    counts_reward: bool
    room: RemoteRoom
    _open: dict[str, set[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def words(self) -> str:
        """Return what the server says of it, as JSON: the options that a run needs for it."""
        named = {
            "multi_turn_scheduler": self.settings.name,
            "max_turns": self.settings.max_turns,
            "gym_env": self.settings.gym_env,
            "use_gym_env": self.counts_reward or None,
        }
        return json.dumps({name: value for name, value in named.items() if value is not None})

    def attend(self, client: str) -> None:
        """Take in a client."""
        with self._lock:
            self._open.setdefault(client, set())

    def leave(self, client: str) -> None:
        """Release the trajectories of a client that is gone."""
        with self._lock:
            keys = self._open.pop(client, set())
        for key in keys:
            self.room.pass_on({"do": "release", "key": key}, lambda answer: None)

    def answer(self, client: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the scheduler answers to a request of a client. WireError for one that is none."""
        if request.get("do") not in _DOES or not isinstance(request.get("key"), str):
            raise WireError("a request of a scheduler is open, step or release, with a key")
        key = f"{client}/{request['key']}"
        with self._lock:
            if client not in self._open:
                raise WireError("the client of a scheduler attends first")
            if request["do"] == "open":
                self._open[client].add(key)
            elif request["do"] == "release":
                self._open[client].discard(key)
        future: Future[Answer] = Future()
        self.room.pass_on({**request, "key": key}, future.set_result)
        answer = future.result()
        if isinstance(answer, WorkerGone):
            words = tr("the process of the scheduler: {words}", words=answer)
            return {"lost": packed(words)}
        return {name: value for name, value in answer.items() if name != "id"}

    def close(self) -> None:
        """End the process."""
        self.room.close()
