"""In a worker: the requests of environments, to the room that holds them.

{"do": "load", "as": "environment", "target": {…}, "name": "", "shape": null}
    {"shape": {…}}, or {"unusable": [{"kind": "no_hints", …}]}
{"do": "load", "as": "reward", "target": {…}}
    {"number": 0, "wants": {…}, "is_orm": false}
{"do": "open", "key": 7, "row": {…}, "seed": 1, "id": 3}
    {"opened": {…}, "id": 3}, or {"lost": words, "id": 3}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from covey.environments.protocol import Lost, Opened, Stepped
from covey.environments.room import Room
from covey.environments.shape import Shape
from covey.environments.tool import Limits, packed_faults, packed_result, unloadable
from covey.rewards.arguments import plain_value
from covey.rewards.callee import packed_reply
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.protocol import TrainerState, packed_fault
from covey.rewards.targets import Target
from covey.texts import packed, tr
from covey.types import ToolCall, ToolResult

Send = Callable[[Mapping[str, Any]], None]


class EnvironmentWorker:
    """Answers requests of environments."""

    def __init__(self, loader: Loader, limits: Limits, end: Callable[[str], None]) -> None:
        self._loader = loader
        self._room = Room(limits, end)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import a class of environments, or a reward that looks at them."""
        target = Target(**request["target"])
        try:
            if request["as"] == "reward":
                callee, is_orm = self._loader.load(target)
                number = self._room.add_reward(callee)
                return {"number": number, "wants": asdict(callee.wants), "is_orm": is_orm}
            factory = self._loader.attribute(target)
        except Unloadable as fault:
            if request["as"] == "reward":
                return {"fault": packed_fault(fault.of(target.entry))}
            return packed_faults([unloadable(fault)])
        shape = request["shape"] and Shape(**request["shape"])
        found = self._room.add(request["name"], factory, shape)
        if isinstance(found, Shape):
            return {"shape": asdict(found)}
        return packed_faults(found)

    def begin(self, request: Mapping[str, Any], send: Send) -> None:
        """Begin what is answered when it is done."""
        room, key = self._room, request.get("key", 0)

        def tell(answer: Any) -> None:
            send(packed_answer(answer))

        match request["do"]:
            case "load":
                send(self.answer(request))
            case "open":
                room.open(key, request["row"], request["seed"], tell)
            case "step":
                room.step(key, request["turn"], tell)
            case "call":
                room.call(key, ToolCall(name=request["tool"], arguments=request["arguments"]), tell)
            case "reward":
                room.reward(key, tell)
            case "release":
                room.release(key, lambda: send({}))
            case _:
                room.call_reward(
                    request["reward"],
                    request["arguments"],
                    request["keys"],
                    TrainerState(**request["state"]),
                    request["limit_s"],
                    lambda reply: send({"reply": packed_reply(reply)}),
                )


def packed_answer(answer: Opened | Stepped | ToolResult | Lost | float | None) -> dict[str, Any]:
    """Return an answer as JSON holds it; one that it cannot hold is lost."""
    match answer:
        case Lost():
            return {"lost": packed(answer.words)}
        case ToolResult():
            return {"result": packed_result(answer)}
        case Opened() | Stepped():
            name = "opened" if isinstance(answer, Opened) else "stepped"
            told = asdict(answer)
            if isinstance(answer, Stepped) and answer.ended is not None:
                told["ended"]["notes"] = [*map(packed, answer.ended.notes)]
            try:
                return {name: json.loads(json.dumps(told, default=plain_value))}
            except (TypeError, ValueError, RecursionError) as error:
                words = tr("what the environment returned cannot be passed on: {error}", error=error)
                return {"lost": packed(words)}
        case _:
            return {"reward": answer}
