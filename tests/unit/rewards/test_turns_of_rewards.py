"""What rewards are given of several turns."""

from __future__ import annotations

from dataclasses import replace

from covey.rewards.arguments import arguments_of
from covey.rewards.callee import Wants
from covey.types import ToolCall, ToolResult, Turn

CALL = ToolCall(name="add", arguments={"a": 1}, text="<tool_call>…</tool_call>")
TURNS = (
    Turn(
        text="<tool_call>…</tool_call>",
        content="",
        calls=(CALL,),
        results=(ToolResult(name="add", content="3"),),
        answer=({"role": "tool", "name": "add", "content": "3"},),
    ),
    Turn(text="It is 3.", content="It is 3."),
)
NAMES = ("completions", "messages", "turns", "num_turns", "environment_reward")


def given(rows, form="text", names=NAMES, *, takes_all=False):
    return arguments_of(rows, form, Wants(names=names, demands=(), takes_all=takes_all), "\n\n")


def test_a_reward_sees_turns_calls_and_results(scored) -> None:
    row = scored("It is 3.")
    episode = replace(row.episode, turns=TURNS, environment_reward=0.5)
    found = given([replace(row, episode=episode)])
    assert found["completions"] == ["It is 3."] and found["num_turns"] == [2]
    assert found["turns"][0][0]["results"][0]["content"] == "3" and found["environment_reward"] == [0.5]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    spoken = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert given([replace(row, episode=episode)], "messages")["completions"] == [spoken]
    assert found["messages"][0][1:] == spoken


def test_a_completion_is_one_turn(scored) -> None:
    """In the trial too, where nothing was sampled."""
    found = given([scored("5", opened="<think>\n")])
    assert found["num_turns"] == [1] and found["turns"][0][0]["text"] == "5"
    assert given([scored("5", opened="<think>\n")], "messages")["completions"] == [
        [{"role": "assistant", "content": "<think>\n5"}]
    ]


def test_a_column_of_the_name_is_meant_without_turns(scored) -> None:
    assert given([scored("5", num_turns=7)])["num_turns"] == [7]
    assert "turns" not in given([scored("5")], names=(), takes_all=True)
