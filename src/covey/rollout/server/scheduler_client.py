"""Asks the schedulers of rollout servers for a run; each trajectory lives on one of the servers."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import IncompleteRead
from typing import Any

from covey.environments.protocol import Lost, Opened, Stepped
from covey.environments.remote_room import lost_of, opened_of, stepped_of
from covey.rewards.arguments import plain_value
from covey.rollout.server.call import FAULTS, Answer, Caller, words_of
from covey.rollout.server.wire import JSON_BYTES
from covey.texts import tr

# Requests that wait for schedulers at a time.
_THREADS = 256
# Seconds in which no trajectory begins on a server that has failed.
_AWAY_S = 60.0


@dataclass(slots=True)
class _Server:
    """Asks the scheduler of one server; `attending` is held for as long as this client lives, and `failed_at`
    is when it has last failed, by time.monotonic."""

    caller: Caller
    attending: Answer | None = None
    failed_at: float = -_AWAY_S
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_there(self) -> bool:
        """Return whether it has not failed for a while."""
        return time.monotonic() - self.failed_at >= _AWAY_S

    def ask(self, client: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the scheduler; raises one of FAULTS."""
        with self.lock:
            if self.attending is not None and self.attending.is_over():
                self.attending.close()
                self.attending = None
            if self.attending is None:
                self.attending = self.caller.open("POST", "/v1/scheduler/attend", {"client": client})
                self.attending.json()
        with self.caller.open("POST", "/v1/scheduler", {"client": client, "request": request}) as found:
            found.line_bytes = JSON_BYTES
            for line in found.lines():
                # The others say that the server is there.
                if "answer" in line:
                    answer: dict[str, Any] = line["answer"]
                    return answer
        raise IncompleteRead(b"")


@dataclass(slots=True)
class _Trajectory:
    """Holds the server where a trajectory lives, and each request with its answer."""

    key: int
    server: _Server
    played: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


class ServedRooms:
    """Deals trajectories out to the servers, whose schedulers are the same. One whose server is gone begins
    again on another one, with the turns that it was given; where it does not go the same way there, it is
    lost. `sampling` is what requests begin with."""

    pids: tuple[int, ...] = ()

    def __init__(self, callers: Sequence[Caller], sampling: Mapping[str, Any]) -> None:
        self._servers = [_Server(caller) for caller in callers]
        self._sampling = dict(sampling)
        self._client = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor(_THREADS, "schedulers")
        self._trajectories: dict[int, _Trajectory] = {}

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Begin a trajectory on one of the servers that answer."""
        there = [server for server in self._servers if server.is_there] or self._servers
        self._trajectories[key] = _Trajectory(key, there[key % len(there)])
        request = {"do": "open", "row": row, "seed": seed, "sampling": self._sampling}
        self._send(key, request, lambda answer: done(lost_of(answer) or opened_of(answer)))

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Stepped | Lost], None]) -> None:
        """Give a trajectory a turn."""
        self._send(key, {"do": "step", "turn": turn}, lambda answer: done(stepped_of(answer)))

    def release(self, key: int, done: Callable[[], None]) -> None:
        """Forget a trajectory."""
        self._send(key, {"do": "release"}, lambda answer: done())
        self._trajectories.pop(key, None)

    def close(self) -> None:
        """Leave the servers, which release what is left."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            if server.attending is not None:
                server.attending.close()

    def _send(self, key: int, request: Mapping[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        trajectory = self._trajectories.get(key)

        def ask() -> None:
            if trajectory is None:
                done({"lost": tr("the environment is not there any more")})
                return
            try:
                sent = json.loads(json.dumps({**request, "key": str(key)}, default=plain_value))
                answer = self._answer(trajectory, sent)
            except (ValueError, TypeError, RecursionError) as error:
                answer = {"lost": tr("could not be sent: {error}", error=error)}
            try:
                done(answer)
            except (LookupError, TypeError, AttributeError) as error:
                # It is no answer of a scheduler.
                address = trajectory.server.caller.address
                words = tr("the scheduler of {address}: {words}", address=address, words=words_of(error))
                done({"lost": words})

        with suppress(RuntimeError):
            # Closed: what is pending has been answered.
            self._threads.submit(ask)

    def _answer(self, trajectory: _Trajectory, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, of another server where that of the trajectory is gone."""
        while True:
            server = trajectory.server
            try:
                answer = server.ask(self._client, request)
                trajectory.played.append((request, answer))
                return answer
            except FAULTS as error:
                server.failed_at = time.monotonic()
                address = server.caller.address
                words = tr("the scheduler of {address}: {words}", address=address, words=words_of(error))
            others = [other for other in self._servers if other.is_there]
            if not others or request["do"] == "release":
                return {"lost": words}
            trajectory.server = others[trajectory.key % len(others)]
            if not self._plays_again(trajectory):
                return {"lost": tr("{words}; another server plays it in another way", words=words)}

    def _plays_again(self, trajectory: _Trajectory) -> bool:
        """Return whether the server of a trajectory answers all that was played as it was answered before."""
        try:
            asked = (trajectory.server.ask(self._client, request) for request, _ in trajectory.played)
            pairs = zip(asked, trajectory.played, strict=True)
            return all(answer == before for answer, (_, before) in pairs)
        except FAULTS:
            # Seen again at the next request.
            return True
