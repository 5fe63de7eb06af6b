"""Episodes of several turns without a model: scripted turns, tools that answer at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.agents import Agents, TurnLimits
from covey.environments.call_format import CallFormat
from covey.environments.protocol import EnvironmentHost
from covey.environments.rendering import Renderer, calls_alike
from covey.environments.template_calls import format_of
from covey.rollout.scripted import Script, ScriptedEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import Episode, Origin, Prompt, SamplingParams, ToolCall, ToolResult

CALL = ToolCall(name="calculate", arguments={"expression": "2*3"})
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "As 2*3."}},
            "required": ["expression"],
        },
    },
}


class AnsweringTools:
    """A host of the tool `calculate` that answers with what a function makes of the call."""

    def __init__(self, answer: Callable[[ToolCall], str] = lambda call: "6") -> None:
        self.schemas = {"calculate": SCHEMA}
        self._answer = answer

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        done(ToolResult(name=call.name, content=self._answer(call)))

    def close(self) -> None:
        pass


def agents_for(
    codec: TextCodec,
    tools: AnsweringTools | None = None,
    environment: EnvironmentHost | None = None,
    form: CallFormat | None = None,
    **limits: Any,
) -> Agents:
    form = form or format_of(codec)
    return Agents(
        renderer=Renderer(codec, calls_alike(codec, form)),
        limits=TurnLimits(**{"max_tokens": 4096, **limits}),
        format=form,
        tools=tools,
        environment=environment,
        keys=count(),
    )


def prompt_of(
    codec: TextCodec, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> Prompt:
    text = codec.render(messages, tools=tools)
    return Prompt(
        id=3,
        messages=tuple(messages),
        text=text,
        token_ids=codec.encode([text])[0],
        columns={},
        origin=Origin(epoch=0, rollout=0),
        rendered_with={"tools": [*tools]} if tools else {},
    )


def plan_of(codec: TextCodec, num_generations: int = 1, split: str = "train") -> CollectPlan:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4096, stop_token_ids=codec.stop_token_ids)
    return CollectPlan(num_generations=num_generations, sampling=sampling, seed=1, split=split)


def episodes_of(
    codec: TextCodec, prompt: Prompt, script: Script, agents: Agents, num_generations: int = 1
) -> tuple[list[Episode], ScriptedEngine]:
    """The episodes of one prompt in sibling order, and the engine with the requests that it was given."""
    engine, plan = ScriptedEngine(codec, script), plan_of(codec, num_generations)
    slots = slots_of([prompt], plan)
    found = dict(TurnLoop(slots, engine, codec, agents, Activity()).episodes())
    return [found[number] for number in range(len(slots))], engine
