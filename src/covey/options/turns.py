"""Declares the options of tools, environments and turns."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, PathKind, only_if_set, option

GYM_SCHEDULERS = ("gym_scheduler", "openenv_scheduler")
"""The schedulers of ms-swift that give each episode a reward."""


class TurnOptions(Options):
    """Turns, tools and environments."""

    tools: list[str] = option(
        [],
        "Functions that the model may call, each FILE.py:NAME or package.module.name, with type hints and a "
        "docstring that describes every argument. The results go back to the model, which goes on.",
        trl="none",
        path=PathKind("E390"),
    )
    environment_factory: str | None = option(
        None,
        "Class of the environment, FILE.py:NAME or package.module.name: one of covey's protocol (reset(row, "
        "seed), step(turn)), or as TRL has it (reset(**columns), public methods are tools, get_reward()).",
        trl="not set",
        names=("environment",),
        path=PathKind("E390"),
    )
    rollout_func: str | None = option(
        None,
        "Function that makes the completions of a rollout itself, as TRL has it: rollout_func(prompts, "
        "trainer), FILE.py:NAME or package.module.name. Each training process loads and calls it, so that "
        "it can sample with the engine of the run: trainer.generate(prompts).",
        trl="none",
        path=PathKind("E390"),
    )
    multi_turn_scheduler: str | None = option(
        None,
        "Scheduler of ms-swift that makes the episodes: math_tip_trick, thinking_tips_scheduler, "
        "gym_scheduler, openenv_scheduler, or a name that a file of --external_plugins puts into "
        "multi_turns.",
        swift="not set",
    )
    gym_env: str | None = option(
        None,
        "Gym environment of gym_scheduler: math_env, or a name that a file of --external_plugins puts into "
        "envs. A row may name its own in env_config.",
        swift="not set",
        read_if=only_if_set("multi_turn_scheduler"),
    )
    use_gym_env: bool | None = option(
        None,
        "Count the total_reward of the scheduler as the reward environment, behind those of reward_funcs. "
        "Not set: where gym_env is given, and with gym_scheduler and openenv_scheduler.",
        swift="where gym_env is set",
        read_if=only_if_set("multi_turn_scheduler"),
    )
    loss_scale: Literal["default", "last_round"] = option(
        "default",
        "Turns of an episode that are trained: default: all of them; last_round: the last one. What a "
        "scheduler masks itself counts instead.",
        swift="default, last_round without a scheduler",
    )
    environment_starts: Literal["alike", "differ"] = option(
        "alike",
        "Whether the episodes of a group must begin with the same prompt, where an environment or "
        "rollout_func makes it. alike: the run stops where they do not; differ: each may begin in its own "
        "way.",
    )
    max_environments: int = option(
        256,
        "Largest number of environments that a training process keeps at a time; further episodes wait.",
        ge=1,
        why="Each running episode needs an environment of its own, so at least 1 is needed.",
        resume="free",
        read_if=only_if_set("environment_factory"),
    )
    max_turns: int | None = option(
        None,
        "Largest number of turns of the model in an episode. Not set: no limit beside that of the tokens.",
        ge=1,
        why="An episode has at least one turn.",
        swift="not set",
    )
    max_tool_calling_iterations: int | None = option(
        None,
        "How often calls of tools are answered in an episode; 0 answers none. Not set: no limit beside that "
        "of the tokens.",
        ge=0,
        why="It is a number of turns with calls.",
        trl="not set",
    )
    completion_length_limit_scope: Literal["total", "per_round"] = option(
        "total",
        "What max_completion_length limits: total: all turns of an episode with the results of tools; "
        "per_round: each turn of the model.",
        trl="total",
        swift="per_round",
    )
    max_tool_response_length: int | None = option(
        None,
        "Largest number of tokens of one result of a tool; what is longer is cut. Not set: no limit beside "
        "that of the completion.",
        ge=1,
        why="It is a number of tokens.",
    )
    tool_timeout_s: float = option(
        60.0,
        "Time limit for one call of a tool or of an environment, in seconds.",
        gt=0,
        why="With 0 seconds every call would time out.",
        resume="free",
    )
    tool_workers: int = option(
        ...,
        "Number of processes that run tools, per training process.",
        rule="the number of cores, at most 8",
        ge=1,
        why="Tools run in worker processes, so at least one is needed.",
        usual=2,
        resume="free",
        read_if=only_if_set("tools"),
    )
    tool_memory_gb: float = option(
        4.0,
        "Largest memory of a process that runs tools, in GB.",
        gt=0,
        why="With 0 GB the process that runs the tools could not start.",
        resume="free",
        read_if=only_if_set("tools"),
    )

    @property
    def has_turns(self) -> bool:
        """Return whether an episode may have several turns."""
        others = (self.environment_factory, self.multi_turn_scheduler)
        return bool(self.tools) or any(name is not None for name in others)

    @property
    def makes_prompts(self) -> bool:
        """Return whether an environment, a scheduler or a function makes the prompt that an episode begins
        with."""
        makers = (self.environment_factory, self.multi_turn_scheduler, self.rollout_func)
        return any(name is not None for name in makers)

    @property
    def is_limited_by_turn(self) -> bool:
        """Return whether max_completion_length limits each turn alone."""
        return self.has_turns and self.completion_length_limit_scope == "per_round"
