"""The environments of a process, whichever it is: made, reset, asked and closed, each in a thread of its
own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from covey.environments.calls import Lane, Late, Loop, Outcome, Raised
from covey.environments.protocol import Lost, Opened, Stepped, ToolFault
from covey.environments.returned import WrongReturn, read_reset, read_reward, read_step
from covey.environments.schema import BadArguments
from covey.environments.seeding import ResetLock, seed_generators
from covey.environments.shape import Shape, shape_of
from covey.environments.tool import Limits, Tool, failed, result_of, unloadable
from covey.rewards.callee import Callee, Reply, describe, file_of
from covey.rewards.images import NAMES, opened
from covey.rewards.loading import Loader, Unloadable, callee_of
from covey.rewards.pool import Loaded
from covey.rewards.protocol import TrainerState
from covey.rewards.targets import Target, callable_name
from covey.texts import joined, tr
from covey.types import CallFailure, RewardFault, Status, ToolCall, ToolResult

Factory = Callable[[], Any]
_ANSWERS_WITHIN_S = 1.0


class Place:
    """Holds one environment, from before it is made to its release."""

    def __init__(self, lane: Lane, factory: Factory, shape: Shape) -> None:
        self.lane, self.factory, self.shape = lane, factory, shape
        self.name = _name_of(factory)
        self.environment: Any = None
        self.tools: dict[str, Tool] = {}

    def lost(self, method: str, outcome: Raised | Late) -> Lost:
        """Say that a method failed."""
        where = f"{self.name}.{method}()" if method else f"{self.name}()"
        if isinstance(outcome, Late):
            return Lost(words=tr("{where} returned nothing within {n:g} s", where=where, n=outcome.seconds))
        return Lost(words=tr("{where}: {words}", where=where, words=self._said(outcome.error)))

    def _said(self, error: BaseException) -> str:
        return _said(error, self.factory if self.environment is None else self.environment)

    def tool(self, name: str) -> Tool:
        """Return a method as a tool."""
        if name not in self.tools:
            self.tools[name] = Tool.of(getattr(self.environment, name))
        return self.tools[name]


class Room:
    """Holds environments by key, and the rewards that look at them.

    All that is sync runs in the thread of its environment, all that is async on one loop. Constructors and
    `reset` run one at a time, an async `reset` to its end: they draw from the generators of random, numpy and
    torch, which are seeded right before and belong to the whole process. `end` ends a process that holds
    nothing else; without it this one is the program's.
    """

    def __init__(self, limits: Limits, end: Callable[[str], None] | None = None) -> None:
        self._limits = limits
        self._end = end
        self._factories: dict[str, tuple[Factory, Shape]] = {}
        self._places: dict[int, Place] = {}
        self._rewards: list[Callee] = []
        self._loop = Loop()
        self._lane_of_rewards: Lane | None = None
        self._reset_lock = ResetLock(restores=end is None)

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of processes beside this one: there is none."""
        return ()

    def add(self, name: str, entry: Factory | Target, shape: Shape | None = None) -> Shape | list[ToolFault]:
        """Take in what makes environments, under the name that rows call it; "" is for all rows. Without a
        shape one is made and closed again."""
        try:
            factory: Factory = _here(entry) if isinstance(entry, Target) else entry
        except Unloadable as fault:
            return [unloadable(fault)]
        found = self._tried(factory) if shape is None else shape
        if isinstance(found, Shape):
            self._factories[name] = (factory, found)
        return found

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Make an environment and reset it."""
        name = "" if "" in self._factories else row.get("environment")
        if not isinstance(name, str) or name not in self._factories:
            names = joined(", ", [*self._factories])
            words = tr(
                "the column `environment` of the row is {name!r}; the environments are: {names}",
                name=name,
                names=names,
            )
            done(Lost(words=words))
            return
        factory, shape = self._factories[name]
        # What chose the environment is not told to it.
        row = {n: v for n, v in row.items() if not name or n != "environment"}
        place = Place(Lane(self._loop), factory, shape)
        self._places[key] = place

        def reset() -> Any:
            seed_generators(seed)
            place.environment = factory()
            seen = {n: opened(v) if n in NAMES else v for n, v in row.items()}
            return place.environment.reset(**shape.arguments(seen, seed))

        def told(outcome: Outcome) -> None:
            method = "" if place.environment is None else "reset"
            done(self._read(place, method, outcome, partial(read_reset, shape)))
            self._check_loop(outcome)

        place.lane.run(reset, self._limits.timeout_s, told, self._reset_lock)

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Stepped | Lost], None]) -> None:
        """Give an environment a turn."""
        self._ask(key, "step", lambda e: e.step(turn=turn), read_step, done)

    def reward(self, key: int, done: Callable[[float | Lost | None], None]) -> None:
        """Ask an environment for its reward; None where it has none."""
        place = self._places.get(key)
        if place is not None and not place.shape.has_reward:
            done(None)
            return
        self._ask(key, "get_reward", lambda e: e.get_reward(), read_reward, done)

    def call(self, key: int, call: ToolCall, done: Callable[[ToolResult | Lost], None]) -> None:
        """Call a method as a tool."""
        place = self._places.get(key)
        if place is None or place.environment is None:
            done(_not_here())
            return
        if call.name not in place.shape.tools:
            done(failed(call.name, CallFailure.UNKNOWN, f"there is no tool {call.name}"))
            return
        tool = place.tool(call.name)
        try:
            function = partial(tool.function, **tool.signature.fit(call.arguments))
        except BadArguments as error:
            done(failed(call.name, CallFailure.ARGUMENTS, str(error)))
            return

        def told(outcome: Outcome) -> None:
            done(result_of(call.name, outcome, self._limits.max_result_chars))
            self._check_loop(outcome)

        place.lane.run(function, self._limits.timeout_s, told)

    def release(self, key: int, done: Callable[[], None]) -> None:
        """Forget an environment; `done` is told when its `close`, if it has one, is over."""
        place = self._places.pop(key, None)
        if place is None:
            done()
        else:
            self._close(place, done)

    def load_reward(self, reward: Target | Callable[..., Any]) -> Loaded | RewardFault:
        """Take in a reward function of this program, or import one into it."""
        label = reward.entry if isinstance(reward, Target) else callable_name(reward)
        try:
            callee, is_orm = callee_of(_here(reward) if isinstance(reward, Target) else reward, {})
        except Unloadable as fault:
            return fault.of(label)
        return Loaded(number=self.add_reward(callee), wants=callee.wants, is_orm=is_orm)

    def add_reward(self, callee: Callee) -> int:
        """Take in a reward function, whose number is returned."""
        callee.wait = self._loop.wait
        self._rewards.append(callee)
        return len(self._rewards) - 1

    def call_reward(
        self,
        number: int,
        arguments: Mapping[str, Sequence[Any]],
        keys: Sequence[int],
        state: TrainerState,
        limit_s: float,
        done: Callable[[Reply], None],
    ) -> None:
        """Call a reward function on the environments of these keys, one function at a time."""
        places = [self._places.get(key) for key in keys]
        if not all(places):
            words = tr("was not called, because the environment of a completion is gone")
            done({"failed": words, "status": Status.ERROR.value})
            return
        environments = [place.environment for place in places if place is not None]
        given = {**arguments, "environments": environments}
        self._lane_of_rewards = self._lane_of_rewards or Lane(self._loop)

        def told(outcome: Outcome) -> None:
            if isinstance(outcome, Late):
                words = tr("returned nothing within {limit_s:g} s", limit_s=limit_s)
                done({"failed": words, "status": Status.TIMEOUT.value})
            elif isinstance(outcome, Raised):
                done({"raised": _said(outcome.error, self._rewards[number])})
            else:
                done(outcome.value)
            self._check_loop(outcome)

        call = partial(self._rewards[number].call, given, len(keys), state)
        self._lane_of_rewards.run(call, limit_s, told)

    def close(self) -> None:
        """Do nothing: what runs in a thread of this process cannot be ended."""

    def _tried(self, factory: Factory) -> Shape | list[ToolFault]:
        """Make an environment, and return its shape."""
        name = _name_of(factory)
        self._reset_lock.acquire()
        try:
            environment = factory()
        except BaseException as error:  # noqa: BLE001 - it is somebody's code: what it raises is its result
            words = tr("{name}() raised {words}", name=name, words=_said(error, factory))
            return [ToolFault(entry=name, kind="environment", words=words)]
        finally:
            self._reset_lock.release()
        shape = shape_of(name, environment)
        if isinstance(shape, Shape):
            place = Place(Lane(self._loop), factory, shape)
            place.environment = environment
            self._close(place, lambda: None)
        return shape

    def _ask(
        self,
        key: int,
        method: str,
        ask: Callable[[Any], Any],
        read: Callable[[Any], Any],
        done: Callable[[Any], None],
    ) -> None:
        place = self._places.get(key)
        if place is None or place.environment is None:
            done(_not_here())
            return

        def told(outcome: Outcome) -> None:
            done(self._read(place, method, outcome, read))
            self._check_loop(outcome)

        place.lane.run(lambda: ask(place.environment), self._limits.timeout_s, told)

    def _read(self, place: Place, method: str, outcome: Outcome, read: Callable[[Any], Any]) -> Any:
        if isinstance(outcome, Raised | Late):
            return place.lost(method, outcome)
        try:
            return read(outcome.value)
        except WrongReturn as error:
            return Lost(words=tr("{name}.{method}() {words}", name=place.name, method=method, words=error))
        except Exception as error:  # noqa: BLE001 - to read a value may run users' code
            return place.lost(method, Raised(error))

    def _close(self, place: Place, done: Callable[[], None]) -> None:
        def close() -> Any:
            method = getattr(place.environment, "close", None)
            return method() if callable(method) else None

        place.lane.run(close, self._limits.timeout_s, lambda outcome: done())
        place.lane.end()

    def _check_loop(self, outcome: Outcome) -> None:
        is_late = isinstance(outcome, Late)
        if is_late and self._end is not None and self._loop.is_blocked(_ANSWERS_WITHIN_S):
            self._end(tr("an async method kept the event loop busy, so that their process was ended"))


def _here(target: Target) -> Any:
    """Import what a target names into this process."""
    return Loader((), {}).attribute(target)


def _said(error: BaseException, owner: Any) -> str:
    try:
        return describe(error, file_of(owner))
    except Exception:  # noqa: BLE001 - an exception whose text raises has none
        return type(error).__name__


def _name_of(factory: Factory) -> str:
    return str(getattr(factory, "__name__", type(factory).__name__))


def _not_here() -> Lost:
    return Lost(words=tr("the environment is not there any more"))
