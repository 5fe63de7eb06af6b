"""Runs the calls of a turn, and cuts their results to what the model is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.rollout.running import Running, refused
from covey.types import ToolCall, ToolResult

# Calls of one turn that are answered; the text of a turn may hold thousands.
_MOST_CALLS = 64
Done = Callable[[object], None]


def start_calls(one: Running, calls: Sequence[ToolCall], agents: Agents, due: Callable[[int], Done]) -> None:
    """Start the calls of a turn side by side; `due` gives what is told the result of each, by its number."""
    one.results, one.missing = {}, len(calls)
    one.num_tool_rounds += 1
    names = [schema["function"]["name"] for schema in one.schemas]
    for index, call in enumerate(calls):
        done = due(index)
        if index >= _MOST_CALLS:
            done(refused(replace(call, fault=f"a turn may make {_MOST_CALLS} calls"), names))
        elif call.fault or call.name not in names:
            done(refused(call, names))
        elif call.name in one.of_environment and agents.environment is not None:
            agents.environment.call(one.key, call, done)
        elif agents.tools is not None:
            agents.tools.call(call, done)
        else:
            done(refused(call, ()))


def results_of(one: Running, codec: TextCodec, most_tokens: int | None) -> tuple[ToolResult, ...]:
    """Return the results of the calls in their order, each within `most_tokens`."""
    given = [one.results[index] for index in sorted(one.results)]
    return tuple(replace(result, content=_cut(result.content, codec, most_tokens)) for result in given)


def _cut(text: str, codec: TextCodec, most_tokens: int | None) -> str:
    if most_tokens is None:
        return text
    (ids,) = codec.encode([text])
    if len(ids) <= most_tokens:
        return text
    return f"{codec.written_out(ids[:most_tokens])}\n[cut after {most_tokens} of {len(ids)} tokens]"
