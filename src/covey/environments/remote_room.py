"""A room of environments in a process of its own, which is started again where it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import asdict
from typing import Any

from covey.environments.channel import Answer, Channel
from covey.environments.protocol import Ended, History, Lost, Opened, Stepped, ToolFault
from covey.environments.scheduler_room import SchedulerSettings
from covey.environments.shape import Shape
from covey.environments.tool import failed, faults_of, unpacked_result
from covey.rewards.callee import Reply, Wants, unpacked_reply
from covey.rewards.pool import Loaded, awaited
from covey.rewards.process import WorkerGone
from covey.rewards.protocol import TrainerState, unpacked_fault
from covey.rewards.targets import Target, callable_name, target_of_callable
from covey.rewards.workers import Workers, load_request
from covey.texts import tr, unpacked
from covey.types import CallFailure, RewardFault, Status, ToolCall, ToolResult

_TUPLES = ("masks", "last_turns", "messages", "outputs")


class RemoteRoom:
    """Asks the room of a worker; its environments are lost where the process ends, and those that are opened
    later live in a new one."""

    def __init__(self, workers: Workers, load_limit_s: float) -> None:
        self._workers = workers
        self._load_limit_s = load_limit_s
        self._thread = ThreadPoolExecutor(1, "environments")
        self._channel: Channel | None = None
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()

    @property
    def pids(self) -> tuple[int, ...]:
        """The number of the process, where it runs."""
        return self._workers.pids

    def add(self, name: str, target: Any) -> Shape | list[ToolFault]:
        """Import a class of environments and try it once, before any of them is opened."""
        what = load_request(target, **{"as": "environment", "name": name})
        return self._add(target.entry, {**what, "shape": None})

    def add_scheduler(self, settings: SchedulerSettings) -> Shape | list[ToolFault]:
        """Run plugin files and make a scheduler of ms-swift, before any trajectory begins."""
        return self._add(settings.name, {"do": "load", "scheduler": asdict(settings)})

    def _add(self, entry: str, what: Mapping[str, Any]) -> Shape | list[ToolFault]:
        try:
            worker = self._workers.take()
            reply = self._workers.load(worker, what)
        except WorkerGone as gone:
            words = tr("{what}: the import {gone}", what=entry, gone=gone)
            return [ToolFault(entry=entry, kind="import", words=words)]
        self._workers.give_back(worker)
        if "shape" not in reply:
            return faults_of(entry, reply)
        self._workers.loaded.append({**what, "shape": reply["shape"]})
        return Shape(**reply["shape"])

    def open(
        self, key: int, row: Mapping[str, Any], seed: int, done: Callable[[Opened | Lost], None]
    ) -> None:
        """Make an environment and reset it."""

        def begin() -> None:
            try:
                channel = self._running()
            except WorkerGone as gone:
                done(Lost(words=str(gone)))
                return
            self._channels[key] = channel
            request = {"do": "open", "key": key, "row": row, "seed": seed}
            channel.send(request, lambda answer: done(opened_of(answer)))

        self._submit(begin)

    def step(self, key: int, turn: Mapping[str, Any], done: Callable[[Stepped | Lost], None]) -> None:
        """Give an environment a turn."""
        self._send(key, {"do": "step", "turn": turn}, lambda answer: done(stepped_of(answer)))

    def call(self, key: int, call: ToolCall, done: Callable[[ToolResult | Lost], None]) -> None:
        """Call a method as a tool."""
        request = {"do": "call", "tool": call.name, "arguments": dict(call.arguments)}
        self._send(key, request, lambda answer: done(_called(call.name, answer)))

    def reward(self, key: int, done: Callable[[float | Lost | None], None]) -> None:
        """Ask an environment for its reward."""
        self._send(
            key, {"do": "reward"}, lambda answer: done(lost_of(answer) or _content(answer).get("reward"))
        )

    def release(self, key: int, done: Callable[[], None]) -> None:
        """Forget an environment; `done` is told when it is closed."""

        def begin() -> None:
            channel = self._channels.pop(key, None)
            if channel is None:
                done()
            else:
                channel.send({"do": "release", "key": key}, lambda answer: done())

        self._submit(begin)

    def pass_on(self, request: Mapping[str, Any], done: Callable[[Answer], None]) -> None:
        """Send a request of somebody else as it is; `done` is told the answer of the process."""

        def begin() -> None:
            try:
                self._running().send(request, done)
            except WorkerGone as gone:
                done(gone)

        self._submit(begin)

    def load_reward(self, reward: Target | Callable[..., Any]) -> Loaded | RewardFault:
        """Import a reward function that is given environments."""
        if isinstance(reward, Target):
            return awaited(self._thread.submit(self._load_reward, reward))
        name, target = callable_name(reward), target_of_callable(reward)
        if isinstance(target, Target):
            return awaited(self._thread.submit(self._load_reward, target))
        words = tr(
            "{name} cannot be called where the environments are, in a process of their own: {why}",
            name=name,
            why=target,
        )
        return RewardFault(reward=name, kind="signature", words=words, subject=name)

    def call_reward(
        self,
        number: int,
        arguments: Mapping[str, Sequence[Any]],
        keys: Sequence[int],
        state: TrainerState,
        limit_s: float,
        done: Callable[[Reply], None],
    ) -> None:
        """Call a reward function on the environments of these keys."""
        channels = {id(channel): channel for channel in map(self._channels.get, keys)}
        channel = next(iter(channels.values()), None)
        if len(channels) > 1 or channel is None:
            words = tr("was not called, because the environment of a completion is gone")
            done({"failed": words, "status": Status.ERROR.value})
            return

        def answered(answer: Answer) -> None:
            if isinstance(answer, WorkerGone):
                done({"failed": str(answer), "status": answer.status.value})
            else:
                done(unpacked_reply(answer.get("reply", answer)))

        request = {"do": "score", "reward": number, "arguments": arguments, "keys": list(keys)}
        channel.send({**request, "state": asdict(state), "limit_s": limit_s}, answered)

    def close(self) -> None:
        """End the process."""
        self._workers.close()
        self._thread.shutdown(cancel_futures=True)

    def _submit(self, begin: Callable[[], None]) -> None:
        try:
            self._thread.submit(begin)
        except RuntimeError:
            # Closed: what is pending has been answered.
            return

    def _running(self) -> Channel:
        """Return the channel to the process, which is started where none runs."""
        if self._channel is None or not self._channel.is_open:
            self._channel = Channel.over(self._workers.take(), self._workers.forget)
        return self._channel

    def _send(self, key: int, request: Mapping[str, Any], done: Callable[[Answer], None]) -> None:
        channel = self._channels.get(key)
        if channel is None:
            done(WorkerGone(Status.ERROR, tr("the environment is not there any more")))
        else:
            channel.send({**request, "key": key}, done)

    def _load_reward(self, target: Target) -> Loaded | RewardFault:
        request = load_request(target, **{"as": "reward"})
        future: Future[Answer] = Future()
        try:
            channel = self._running()
            channel.send(request, future.set_result)
            answer = future.result(self._load_limit_s)
        except WorkerGone as gone:
            answer = gone
        except LateError:
            channel.end()
            limit_s = self._load_limit_s
            answer = WorkerGone(Status.TIMEOUT, tr("returned nothing within {limit_s:g} s", limit_s=limit_s))
        if isinstance(answer, WorkerGone):
            words = tr("{what}: the import {gone}", what=target.entry, gone=answer)
            return RewardFault(reward=target.entry, kind="import", words=words, subject=target.entry)
        if "fault" in answer:
            return unpacked_fault(answer["fault"])
        self._workers.loaded.append(request)
        named = answer["wants"]
        wants = Wants(
            names=tuple(named["names"]), demands=tuple(named["demands"]), takes_all=named["takes_all"]
        )
        return Loaded(number=answer["number"], wants=wants, is_orm=answer["is_orm"])


def _content(answer: Answer) -> dict[str, Any]:
    assert not isinstance(answer, WorkerGone)
    return answer


def lost_of(answer: Answer) -> Lost | None:
    """Return what an answer says of an environment that failed; None where it did not."""
    if isinstance(answer, WorkerGone):
        return Lost(words=tr("the process of the environments: {words}", words=answer))
    words = answer.get("lost", answer.get("failed"))
    return None if words is None else Lost(words=unpacked(words))


def opened_of(answer: Answer) -> Opened | Lost:
    """Read the answer to `open`."""
    if lost := lost_of(answer):
        return lost
    opened = _content(answer)["opened"]
    messages, stop = opened["messages"], opened["stop"]
    return Opened(
        **{
            **opened,
            "messages": None if messages is None else tuple(messages),
            "tools": tuple(opened["tools"]),
            "stop": None if stop is None else tuple(stop),
        }
    )


def stepped_of(answer: Answer) -> Stepped | Lost:
    """Read the answer to `step`."""
    if lost := lost_of(answer):
        return lost
    stepped = _content(answer)["stepped"]
    history, ended, stop = stepped["history"], stepped["ended"], stepped["stop"]
    notes = tuple(map(unpacked, ended.pop("notes"))) if ended else ()
    return Stepped(
        **{
            **stepped,
            "messages": tuple(stepped["messages"]),
            "history": history and History(**{**history, "messages": tuple(history["messages"])}),
            "ended": ended
            and Ended(**{**ended, **{name: tuple(ended[name]) for name in _TUPLES}}, notes=notes),
            "stop": None if stop is None else tuple(stop),
        }
    )


def _called(name: str, answer: Answer) -> ToolResult | Lost:
    if lost := lost_of(answer):
        return lost
    result = _content(answer).get("result")
    if result is None:
        return failed(name, CallFailure.ENDED, f"{name}() gave no result")
    return unpacked_result(result)
