"""The codes of tools and environments that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E390",
        title="Tool or environment that cannot be loaded",
        why="The model would be told of tools that do not exist.",
    ),
    Code(
        code="E391",
        title="Function that cannot be a tool",
        why="The model is told of a tool by its name, its description and the types of its arguments, which "
        "come from type hints and docstring.",
    ),
    Code(
        code="E392",
        title="Chat template without calls of tools",
        why="The chat template tells the model of its tools and gives it their results; covey reads calls "
        "in the format that the template writes.",
    ),
    Code(
        code="E393",
        title="Class that cannot be an environment",
        why="An environment makes the prompt of an episode, answers the turns of the model, and is made anew "
        "for each episode.",
    ),
    Code(
        code="E394",
        title="Turns that the prompts have no place for",
        why="Turns and the results of tools go through the chat template, together with the messages of the "
        "prompt.",
    ),
    Code(
        code="E395",
        title="Episodes without a limit",
        why="With a limit for each turn alone an episode could go on for ever.",
    ),
    Code(
        code="E396",
        title="Reward of an environment that there is not",
        why="The reward environment is what an environment gives for an episode; else it has no value.",
    ),
    Code(
        code="W154",
        title="Rewards of the environment are not counted",
        why="What an environment gives for an episode is a reward like any other: it is counted where "
        "reward_funcs names it.",
    ),
    Code(
        code="E397",
        title="Environment that begins a group differently",
        why="GRPO compares the episodes of a group with each other. Where they begin from different states, "
        "a reward says more about the beginning than about what the model did.",
    ),
    Code(
        code="W155",
        title="Right answer is not the best policy",
        why="What scores at least as much as the right answer is learned instead of it.",
    ),
    Code(
        code="W156",
        title="Silence scores more than trying",
        why="A model that learns to say nothing is hard to teach anything else.",
    ),
    Code(
        code="W157",
        title="No policy is given a reward",
        why="A run whose episodes have no reward stops at its first rollout.",
    ),
)
