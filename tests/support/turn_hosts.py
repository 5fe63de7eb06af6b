"""Tools and environments of functions, and engines that fail, for episodes without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.protocol import Lost, Opened, Stepped
from covey.errors import EngineLost
from covey.rollout.scripted import ScriptedEngine
from covey.types import Completion, Finding, Finish, KeptSets, ToolCall, ToolResult
from support.agents import SCHEMA, AnsweringTools


class LateTools(AnsweringTools):
    """Answers with the expression of a call, after as many seconds as it says, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)

        def answer() -> None:
            with self._lock:
                self.running -= 1
            done(ToolResult(name=call.name, content=call.arguments["expression"]))

        threading.Timer(float(call.arguments["expression"]), answer).start()


@dataclass
class Environments:
    """Environments of three functions, which get the number of the environment in the order of `open`;
    without `step` its methods are tools, which `call` answers. What was asked is in `asked`."""

    reset: Callable[[int], Opened | Lost] = lambda number: Opened()
    step_: Callable[[int, Mapping[str, Any]], Stepped | Lost] | None = None
    reward_: Callable[[int], float | Lost | None] | None = None
    call_: Callable[[int, ToolCall], ToolResult | Lost] | None = None
    name: str = "functions"
    is_late: bool = False
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    keeps_history = False

    @property
    def has_step(self) -> bool:
        return self.step_ is not None

    @property
    def has_reward(self) -> bool:
        return self.reward_ is not None

    def _tell(self, answer: Any, done: Callable[[Any], None]) -> None:
        if self.is_late:
            threading.Timer(0.01, done, [answer]).start()
        else:
            done(answer)

    def open(self, key: int, row: Any, seed: int, done: Callable[[Any], None]) -> None:
        self.numbers[key] = number = len(self.numbers)
        self.asked.append(("open", number, row, seed))
        self._tell(self.reset(number), done)

    def step(self, key: int, turn: Any, done: Callable[[Any], None]) -> None:
        assert self.step_ is not None
        self.asked.append(("step", self.numbers[key], turn))
        self._tell(self.step_(self.numbers[key], turn), done)

    def call(self, key: int, call: ToolCall, done: Callable[[Any], None]) -> None:
        assert self.call_ is not None
        self._tell(self.call_(self.numbers[key], call), done)

    def reward(self, key: int, done: Callable[[Any], None]) -> None:
        assert self.reward_ is not None
        self._tell(self.reward_(self.numbers[key]), done)

    def release(self, keys: Sequence[int]) -> None:
        self.released += [self.numbers[key] for key in keys]

    def close(self) -> None:
        pass


def asks(turns: int) -> Callable[[int, Mapping[str, Any]], Stepped]:
    """A step that asks again until so many turns, each of which is worth its number."""

    def step(number: int, turn: Mapping[str, Any]) -> Stepped:
        said = {"role": "user", "content": f"Again, {turn['number']}?"}
        return Stepped(messages=(said,), is_done=turn["number"] == turns - 1, reward=float(turn["number"]))

    return step


def tool_environment(call: Callable[[int, ToolCall], ToolResult | Lost]) -> Environments:
    """Environments whose tool is `calculate`."""
    return Environments(reset=lambda number: Opened(tools=(SCHEMA,)), call_=call)


class Failing(ScriptedEngine):
    """Is lost after so many completions."""

    num_left = 0

    def results(self) -> Iterator[Completion]:
        for number, completion in enumerate(super().results()):
            if number == self.num_left:
                break
            yield completion
        raise EngineLost(Finding(code="F140", seen="no server is left", why="", cause=""))


class Aborting(ScriptedEngine):
    """Is told to end every second turn."""

    def results(self) -> Iterator[Completion]:
        for completion in super().results():
            is_first = self.requests[completion.request_id - 1].turn.turn == 0
            yield completion if is_first else replace(completion, finish=Finish.ABORT)


class Filtering(ScriptedEngine):
    """Keeps of each token itself and its neighbour."""

    def results(self) -> Iterator[Completion]:
        for done in super().results():
            sets = [[token, token + 1] for token in done.token_ids.tolist()]
            yield replace(done, kept=KeptSets.of(sets, 400))
