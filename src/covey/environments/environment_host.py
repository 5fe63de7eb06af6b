"""The environments of a rank, in a process of their own or in this one; and where they come from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from covey.environments.calls import Pending
from covey.environments.printed import Printed
from covey.environments.protocol import Lost, Opened, Stepped, ToolFault
from covey.environments.remote_room import RemoteRoom
from covey.environments.room import Room
from covey.environments.shape import Shape
from covey.environments.tool import Limits
from covey.rewards.callee import Reply
from covey.rewards.pool import Loaded
from covey.rewards.protocol import TrainerState
from covey.rewards.targets import Target, callable_name, target_of, target_of_callable
from covey.rewards.workers import Workers
from covey.texts import tr
from covey.types import RewardFault, Status, ToolCall, ToolResult

Entry = str | Callable[..., Any]
_CLOSES_WITHIN_S = 3.0


class HostedEnvironments:
    """Holds up to `places` environments at a time; `open` waits until another one is released."""

    def __init__(self, room: Room | RemoteRoom, shapes: Sequence[Shape], name: str, places: int) -> None:
        self.name = name
        self.has_step = any(shape.has_step for shape in shapes)
        self.keeps_history = any(shape.keeps_history for shape in shapes)
        self.has_reward = any(shape.has_reward for shape in shapes)
        self.has_tools = any(shape.tools for shape in shapes)
        self.takes_seed = any(shape.seeds for shape in shapes)
        # Where rows choose among several, each tells its own tools when it is opened.
        self.schemas = tuple(shapes[0].tools.values()) if len(shapes) == 1 else ()
        self._room = room
        self._places = places
        self._held: set[int] = set()
        self._waiting: dict[int, tuple[Callable[[], None], Callable[[Any], None]]] = {}
        self._pending: Pending[Any] = Pending()
        self._changed = threading.Condition()

    @property
    def pids(self) -> tuple[int, ...]:
        """The number of the process, where it runs; none where it is this one."""
        return self._room.pids

    def keep_all(self) -> None:
        """Have a place for every environment: rewards read them when all of a group have ended."""
        self._places = sys.maxsize

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Make an environment and reset it, as soon as there is a place."""
        tell = self._pending.add(done, _ending())

        def begin() -> None:
            self._room.open(key, row, seed, tell)

        with self._changed:
            has_place = len(self._held) < self._places
            if has_place:
                self._held.add(key)
            else:
                self._waiting[key] = (begin, tell)
        if has_place:
            begin()

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Stepped | Lost], None]) -> None:
        """Give an environment a turn."""
        self._room.step(key, turn, self._pending.add(done, _ending()))

    def call(self, key: int, call: ToolCall, done: Callable[[ToolResult | Lost], None]) -> None:
        """Call a method as a tool."""
        self._room.call(key, call, self._pending.add(done, _ending()))

    def reward(self, key: int, done: Callable[[float | Lost | None], None]) -> None:
        """Ask for the reward of an episode."""
        self._room.reward(key, self._pending.add(done, _ending()))

    def release(self, keys: Sequence[int]) -> None:
        """Forget environments, lost ones too; the place of each is free when its `close` is over."""
        for key in keys:
            with self._changed:
                waiting, is_held = self._waiting.pop(key, None), key in self._held
            if waiting is not None:
                waiting[1](Lost(words=tr("the environment was released before it was opened")))
            elif is_held:
                self._room.release(key, partial(self._free, key))

    def load_reward(self, reward: Target | Callable[..., Any]) -> Loaded | RewardFault:
        """Import a reward function that names the argument `environments`; it is called where they are."""
        return self._room.load_reward(reward)

    def call_reward(
        self,
        number: int,
        arguments: Mapping[str, Sequence[Any]],
        keys: Sequence[int],
        state: TrainerState,
        limit_s: float,
    ) -> Future[Reply]:
        """Call a loaded reward function on completions: it is passed these arguments, one entry a completion,
        and as `environments` the objects of these keys."""
        future: Future[Reply] = Future()
        words = tr("was not called, because the run is ending")
        tell = self._pending.add(future.set_result, {"failed": words, "status": Status.ERROR.value})
        self._room.call_reward(number, arguments, keys, state, limit_s, tell)
        return future

    def close(self) -> None:
        """Answer what runs as lost, close the environments that are open, for a few seconds at most, and end
        their process."""
        self._pending.close()
        with self._changed:
            self._waiting.clear()
            held = list(self._held)
        for key in held:
            self._room.release(key, partial(self._free, key))
        with self._changed:
            self._changed.wait_for(lambda: not self._held, _CLOSES_WITHIN_S)
        self._room.close()

    def _free(self, key: int) -> None:
        begin = None
        with self._changed:
            self._held.discard(key)
            self._changed.notify_all()
            if self._waiting:
                following = next(iter(self._waiting))
                begin, _ = self._waiting.pop(following)
                self._held.add(following)
        if begin is not None:
            begin()


def start_environments(
    entries: Entry | Mapping[str, Entry],
    *,
    places: int,
    timeout_s: float,
    max_result_chars: int,
    memory_gb: float | None = None,
    load_limit_s: float = 60.0,
) -> tuple[HostedEnvironments | None, list[ToolFault]]:
    """Return what holds the environments of a class or a factory, or None and all that is wrong. With several
    by name, the column `environment` of a row has the name of its own.

    They live in one process, except where one of them only exists in this program: then all live here, and
    what is late or takes too much memory cannot be ended. `memory_gb` is for all of the process.
    """
    named = dict(entries) if isinstance(entries, Mapping) else {"": entries}
    limits = Limits(timeout_s=timeout_s, max_result_chars=max_result_chars)
    targets = {n: target_of(e) if isinstance(e, str) else target_of_callable(e) for n, e in named.items()}
    faults = [_unknown(str(named[name])) for name, target in targets.items() if target is None]
    if faults:
        return None, faults
    room: Room | RemoteRoom
    if all(isinstance(target, Target) for target in targets.values()):
        opening = {"holds": "environments", "limits": asdict(limits), "memory_gb": memory_gb}
        room = RemoteRoom(Workers(Printed().start_worker, opening, load_limit_s), load_limit_s)
    else:
        room = Room(limits)
    shapes: list[Shape] = []
    for name, entry in named.items():
        target = targets[name]
        given: Any = target if isinstance(target, Target) else entry
        found = room.add(name, given)
        if isinstance(found, Shape):
            shapes.append(found)
        else:
            label = _label(entry)
            faults += [replace(fault, entry=label) for fault in found]
    if not faults and len({shape.has_step for shape in shapes}) > 1:
        words = tr("some of these environments have `step(turn)` and others tools; a run has one kind")
        faults = [ToolFault(entry=", ".join(named), kind="environment", words=words)]
    if faults:
        room.close()
        return None, faults
    label = "+".join(name or _label(entry).rpartition(":")[2] for name, entry in named.items())
    return HostedEnvironments(room, shapes, label, places), []


def _label(entry: Entry) -> str:
    return entry if isinstance(entry, str) else callable_name(entry)


def _unknown(entry: str) -> ToolFault:
    words = tr("{entry} is neither FILE.py:Class nor package.module:Class", entry=entry)
    return ToolFault(entry=entry, kind="missing", words=words)


def _ending() -> Lost:
    return Lost(words=tr("it was not finished, because the run is ending"))
