"""The codes of tools and environments that no other part uses."""

from __future__ import annotations

from covey.codes import Code

CODES = (
    Code(
        code="E390",
        title="Tool, environment, scheduler or rollout function that cannot be loaded",
        why="covey loads every tool, environment, scheduler and rollout function before the run starts. This "
        "one was not found, or its file raised an error.",
    ),
    Code(
        code="E391",
        title="Function that cannot be a tool",
        why="The chat template gives the model a description of each tool. covey makes it from the "
        "function's name, type hints and docstring, and a part of that is missing here.",
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
        why="The reward function `environment` passes on the rewards that an environment returns. This run "
        "has no environment, or one that returns none.",
    ),
    Code(
        code="W154",
        title="Rewards of the environment are not counted",
        why="What an environment gives for an episode is a reward like any other: it is counted where "
        "reward_funcs names it.",
    ),
    Code(
        code="W158",
        title="Scheduler that asks to train tokens that were not sampled",
        why="covey trains only the tokens that the model sampled, with the log-probabilities of the engine. "
        "The scheduler asked for something else, or rewrote earlier turns. The run goes on without that.",
    ),
    Code(
        code="E397",
        title="Environment that begins a group differently",
        why="GRPO compares the rewards of a group. If its episodes start from different states, the reward "
        "shows which start was easier, not which answer was better.",
    ),
    Code(
        code="W155",
        title="Right answer is not the best policy",
        why="What scores at least as much as the right answer is learned instead of it.",
    ),
    Code(
        code="W156",
        title="Silence scores more than trying",
        why="Saying nothing earns more here than trying, so the model learns to say nothing.",
    ),
    Code(
        code="W157",
        title="No policy is given a reward",
        why="A run whose episodes have no reward stops at its first rollout.",
    ),
)
