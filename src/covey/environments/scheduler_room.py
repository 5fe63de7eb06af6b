"""The trajectories of a scheduler of ms-swift in a worker: one object makes all, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.environments.calls import Loop
from covey.environments.protocol import Lost, Opened, Stepped, ToolFault
from covey.environments.seeding import seed_generators
from covey.environments.shape import SCHEDULED, Shape
from covey.environments.swift.outputs import WrongOutput, read_outputs
from covey.environments.swift.trajectory import Trajectory, as_swift
from covey.environments.tool import Limits
from covey.rewards.callee import describe
from covey.texts import joined, tr

_LOOK_S = 0.2
_ANSWERS_WITHIN_S = 1.0
_current: contextvars.ContextVar[Trajectory] = contextvars.ContextVar("trajectory")
Answer = Opened | Stepped | Lost
Key = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Names a scheduler and what it is made with. `model` is the directory of the model, `sampling` what
    requests begin with, by ms-swift's names."""

    name: str
    plugins: Sequence[str] = ()
    max_turns: int | None = None
    gym_env: str | None = None
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


class InferEngine:
    """Asks the model for turns; schedulers know it as `infer_engine`."""

    def __init__(self, settings: SchedulerSettings, protocol: Any) -> None:
        self.model_dir = settings.model
        self._protocol = protocol
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the model as transformers loads it."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model_dir)
        return self._tokenizer

    async def infer_async(self, infer_request: Any, request_config: Any = None, **kwargs: Any) -> Any:
        """Return the response of the model to a conversation."""
        if isinstance(infer_request, Mapping):
            infer_request = self._protocol.RolloutInferRequest(**infer_request)
        trajectory = _current.get()
        return await trajectory.ask(
            infer_request, trajectory.config if request_config is None else request_config
        )


@dataclass(slots=True)
class _Place:
    """Holds a trajectory while it is made. `deadline` is when the scheduler has to come to its next request,
    None while the model is asked."""

    done: Callable[[Answer], None] | None
    trajectory: Trajectory | None = None
    deadline: float | None = None
    task: asyncio.Task[None] | None = None
    released: Callable[[], None] | None = None
    # Is held until the first request.
    starts: asyncio.Lock | None = None

    def tell(self, answer: Answer) -> None:
        done, self.done, self.deadline = self.done, None, None
        if done is not None:
            done(answer)

    def let_others_start(self) -> None:
        starts, self.starts = self.starts, None
        if starts is not None:
            starts.release()

    def stop(self) -> None:
        self.let_others_start()
        if self.trajectory is not None:
            self.trajectory.drop()
        if self.task is not None:
            self.task.cancel()


class SchedulerRoom:
    """Makes trajectories by key. A scheduler begins one at a time, as it draws from the generators of random,
    numpy and torch, which are seeded right before and belong to the whole process."""

    def __init__(self, limits: Limits, end: Callable[[str], None]) -> None:
        self._limits, self._end = limits, end
        self._loop = Loop()
        self._places: dict[Key, _Place] = {}
        self._starts = asyncio.Lock()
        self._scheduler: Any = None
        self._protocol: Any = None
        self._settings: SchedulerSettings | None = None

    def load(self, settings: SchedulerSettings) -> Shape | list[ToolFault]:
        """Make the scheduler; plugin files have been run."""
        registry = importlib.import_module("swift.rollout.multi_turn").multi_turns
        if settings.name not in registry:
            words = tr(
                "no scheduler of this name is in multi_turns, which has: {names}",
                names=joined(", ", sorted(registry)),
            )
            return [ToolFault(entry=settings.name, kind="missing", words=words)]
        self._protocol = importlib.import_module("swift.infer_engine.protocol")
        self._settings = settings
        engine = InferEngine(settings, self._protocol)
        gym = {} if settings.gym_env is None else {"gym_env": settings.gym_env}
        kind = registry[settings.name]
        if any("async_infer" in vars(own) for own in kind.__mro__ if not own.__module__.startswith("swift.")):
            words = tr(
                "{name} overrides async_infer, which deals out several trajectories at once; covey calls "
                "run() for each",
                name=kind.__name__,
            )
            return [ToolFault(entry=settings.name, kind="environment", words=words)]
        try:
            self._scheduler = kind(infer_engine=engine, max_turns=settings.max_turns, **gym)
        except Exception as error:  # noqa: BLE001 - it is somebody's code: what it raises is its result
            words = tr("{name}() raised {words}", name=kind.__name__, words=self._described(error))
            return [ToolFault(entry=settings.name, kind="environment", words=words)]
        threading.Thread(target=self._watch, daemon=True).start()
        return SCHEDULED

    def open(
        self,
        key: Key,
        row: Mapping[str, Any],
        seed: int,
        done: Callable[[Answer], None],
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a trajectory; `done` is told its first request. `sampling` is that of the settings where it
        is None."""
        place = self._places[key] = _Place(done)
        self._loop.submit(self._play(key, place, row, seed, sampling))

    def step(self, key: Key, turn: Mapping[str, Any], done: Callable[[Answer], None]) -> None:
        """Give a trajectory the turn that it asked for; `done` is told its next request, or its end."""
        place = self._places.get(key)
        if place is None or place.trajectory is None:
            done(Lost(words=tr("the environment is not there any more")))
            return
        trajectory = place.trajectory
        place.done, place.deadline = done, time.monotonic() + self._limits.timeout_s
        self._loop.submit(_call(lambda: trajectory.answer(turn)))

    def release(self, key: Key, done: Callable[[], None]) -> None:
        """Forget a trajectory; `done` is told when its scheduler has let go of it."""
        place = self._places.pop(key, None)
        if place is None:
            done()
            return

        def end() -> None:
            if place.task is None or place.task.done():
                done()
            else:
                place.released = done
                place.stop()

        self._loop.submit(_call(end))

    async def _play(
        self,
        key: Key,
        place: _Place,
        row: Mapping[str, Any],
        seed: int,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        place.task = asyncio.current_task()
        assert place.task is not None

        def tell(asked: Answer) -> None:
            place.tell(asked)
            place.let_others_start()

        try:
            await self._starts.acquire()
            place.starts = self._starts
            place.deadline = time.monotonic() + self._limits.timeout_s
            place.trajectory = self._trajectory(tell, sampling)
            tell(await self._run(key, place.trajectory, row, seed))
        except WrongOutput as error:
            tell(Lost(words=tr("{name} {words}", name=self._name, words=error)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - what somebody's code raises is its result
            if not place.task.cancelling():
                tell(Lost(words=tr("{name}: {words}", name=self._name, words=self._described(error))))
        finally:
            place.let_others_start()
            if place.released is not None:
                place.released()

    def _trajectory(self, tell: Callable[[Answer], None], sampling: Mapping[str, Any] | None) -> Trajectory:
        assert self._settings is not None
        given = self._settings.sampling if sampling is None else sampling
        return Trajectory(tell, self._protocol, self._protocol.RequestConfig(**given))

    async def _run(self, key: Key, trajectory: Trajectory, row: Mapping[str, Any], seed: int) -> Answer:
        columns = {name: value for name, value in row.items() if name not in ("prompt", "images")}
        messages, images = as_swift(row.get("prompt", ()), row.get("images", ()))
        if messages and messages[-1]["role"] == "assistant":
            # The prompt has opened the turn with it.
            messages.pop()
        request = self._protocol.RolloutInferRequest(
            messages=[dict(message) for message in messages],
            images=images,
            data_dict=dict(columns),
            uuid=str(key),
        )
        trajectory.row_messages = messages
        _current.set(trajectory)
        seed_generators(seed)
        try:
            outputs = await self._scheduler.run(request, deepcopy(trajectory.config))
        finally:
            # A task of the scheduler may be waiting for a turn, which comes before the end is told.
            await trajectory.end()
        if not trajectory.has_asked:
            raise WrongOutput(tr("returned without asking the model for a turn"))
        return Stepped(is_done=True, ended=read_outputs(outputs, trajectory.turns, columns))

    def _described(self, error: BaseException) -> str:
        """Return what was raised, with its last line in a plugin file: of a scheduler or an environment."""
        assert self._settings is not None
        plugins = {str(Path(file).resolve()) for file in self._settings.plugins}
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        return describe(error, next((f for f in reversed(files) if str(Path(f).resolve()) in plugins), None))

    @property
    def _name(self) -> str:
        return f"{type(self._scheduler).__name__}.run()"

    def _watch(self) -> None:
        """End trajectories whose scheduler is late, and the process where it lets nothing else run."""
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            # A deadline is read once: the loop changes it meanwhile.
            late = {n: p for n, p in list(self._places.items()) if (p.deadline or now) < now}
            for key, place in late.items():
                self._places.pop(key, None)
                words = tr(
                    "{where} returned nothing within {n:g} s", where=self._name, n=self._limits.timeout_s
                )
                place.tell(Lost(words=words))
                self._loop.submit(_call(place.stop))
            if late and self._loop.is_blocked(_ANSWERS_WITHIN_S):
                self._end(
                    tr("{name} kept the event loop busy, so that its process was ended", name=self._name)
                )


async def _call(function: Callable[[], Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        function()
