"""The scheduler of a rollout server: its trajectories for the runs that use the server, in a process of its
own."""

from __future__ import annotations

import json
import threading
from collections import Counter
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
    # By client: its trajectories, and on how many connections it attends.
    _open: dict[str, set[str]] = field(default_factory=dict)
    _attending: Counter[str] = field(default_factory=Counter)
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
        """Take in a client, on one more connection."""
        with self._lock:
            self._attending[client] += 1
            self._open.setdefault(client, set())

    def leave(self, client: str) -> None:
        """Release the trajectories of a client whose last connection has ended."""
        with self._lock:
            self._attending[client] -= 1
            if self._attending[client]:
                return
            del self._attending[client]
            for key in self._open.pop(client):
                self.room.pass_on({"do": "release", "key": key}, lambda answer: None)

    def ask(self, client: str, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Return what the scheduler will answer to a request of a client. WireError for one that is none."""
        if request.get("do") not in _DOES or not isinstance(request.get("key"), str):
            raise WireError("a request of a scheduler is open, step or release, with a key")
        key = f"{client}/{request['key']}"
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if client not in self._open:
                raise WireError("the client of a scheduler attends first")
            if request["do"] == "open":
                self._open[client].add(key)
            elif request["do"] == "release":
                self._open[client].discard(key)
            # Within the lock: what is begun is passed on before it is released.
            self.room.pass_on(
                {**request, "key": key}, lambda answer: future.set_result(_without_number(answer))
            )
        return future

    def close(self) -> None:
        """End the process."""
        self.room.close()


def _without_number(answer: Answer) -> dict[str, Any]:
    """Return an answer without the number of its request in the process."""
    if isinstance(answer, WorkerGone):
        return {"lost": packed(tr("the process of the scheduler: {words}", words=answer))}
    return {name: value for name, value in answer.items() if name != "id"}
