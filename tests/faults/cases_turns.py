"""Tools, environments and templates that episodes of several turns cannot be made with."""

from __future__ import annotations

from typing import Any

from faults.case import Case, jsonl, sums, words

TOOLS = '''"""Tools."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def untyped(a, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def undescribed(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def positional(a: int, /) -> int:
    """Return a number.

    Args:
        a: The number.
    """
    return a


number = 5
'''
RAISES = "import json\n\nTABLE = json.loads('')\n"
ENVIRONMENTS = '''"""Environments."""


class Sums:
    def reset(self, row, seed):
        return row["prompt"]

    def step(self, turn):
        return [], True, 1.0


class Silent:
    """As TRL has it, without a reward."""

    def reset(self, **columns):
        return None

    def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: The place.
        """
        return where


class NoReset:
    def step(self, turn):
        return []


class Raises:
    def __init__(self):
        raise OSError("no server at port 80")

    def reset(self, row, seed):
        return []


class WantsMore:
    def reset(self, row, seed, difficulty):
        return []

    def step(self, turn, mood):
        return []


class NoHints:
    def reset(self, **columns):
        return None

    def look(self, where):
        """Look somewhere.

        Args:
            where: The place.
        """
'''
SCHEDULERS = '''"""Schedulers."""

import os

from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, RolloutScheduler, multi_turns


class Raises(RolloutScheduler):
    def __init__(self, *args, **kwargs):
        raise OSError("no server at port 80")


class Forgets(MultiTurnScheduler):
    def on_turn_end(self, infer_request, response_choice, current_turn):
        return {"done": infer_request.data_dict["is_done"]}


class Draws(RolloutScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        infer_request.messages = [{"role": "user", "content": os.urandom(4).hex()}]
        return await super().run(infer_request, request_config, **kwargs)


class Board(Env):
    async def reset(self, config):
        raise ConnectionError("no board is free")

    async def step(self, action):
        ...

    async def close(self):
        ...


multi_turns.update(raises=Raises, forgets=Forgets, draws=Draws)
envs["board"] = Board
'''
# Writes tools, calls and results in a way of its own.
_OTHER_CALLS = (
    "{%- for t in tools or [] %}{{- 'TOOL ' + t['function']['name'] + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
    "{%- for c in m['tool_calls'] or [] %}{{- 'PLEASE ' + c['function']['name'] + '!' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
_ADD = "--tools tools.py:add --chat_template chatml-tools"
_TEXTS = jsonl([{"prompt": f"What is {n}+1? ", "solution": str(n + 1)} for n in range(64)])


_ROLLOUTS = {
    "rollouts.py": "def play(prompts, trainer):\n    ...\n\n\ndef of_three(prompts, args, tokenizer):\n    ...\n"
}


def _case(name: str, rest: str, *, files: dict[str, str] | None = None, **given: Any) -> Case:
    return Case(
        name=name,
        words=words(rest, **given),
        files={"tools.py": TOOLS, "envs.py": ENVIRONMENTS, **(files or {})},
    )


def _scheduler(name: str, what: str, rest: str = "", **given: Any) -> Case:
    plugin = "--external_plugins swift_plugin.py" if given.pop("has_plugin", True) else ""
    words = f"--multi_turn_scheduler {what} {plugin} {rest}".strip()
    return _case(name, words, files={"swift_plugin.py": SCHEDULERS, **_ROLLOUTS}, **given)


def _tool(name: str, what: str, **given: Any) -> Case:
    return _case(name, f"--tools {what} --chat_template chatml-tools", **given)


CASES = (
    # -- tools
    _tool("tool_without_types", "tools.py:untyped"),
    _tool("tool_without_a_description", "tools.py:undescribed"),
    _tool("tool_by_position", "tools.py:positional"),
    _tool("tool_that_is_none", "tools.py:number"),
    _tool("tool_that_does_not_exist", "tools.py:ad"),
    _tool("tool_file_that_raises", "raises.py:add", files={"raises.py": RAISES}),
    _tool("tool_by_a_word", "calculator"),
    _tool("tool_given_twice", "tools.py:add tools.py:add"),
    _tool("several_tools_at_fault", "tools.py:add tools.py:untyped tools.py:undescribed calculator"),
    # -- templates
    _case("tools_without_a_template", "--tools tools.py:add"),
    _case(
        "template_with_calls_of_its_own",
        "--tools tools.py:add --chat_template t.jinja",
        files={"t.jinja": _OTHER_CALLS},
    ),
    _case("template_without_tools_of_an_environment", "--environment_factory envs.py:Silent"),
    # -- prompts
    _case(
        "turns_beside_prompts_of_text",
        "--environment_factory envs.py:Sums --apply_chat_template false",
        files={"rows.jsonl": _TEXTS},
        dataset="rows.jsonl",
    ),
    _case("tools_cut_off", f"{_ADD} --truncation_strategy left --max_length 1000"),
    _case(
        "tool_of_a_row_unknown",
        _ADD,
        files={"rows.jsonl": jsonl(sums(64, tools=["add", "search"]))},
        dataset="rows.jsonl",
    ),
    # -- limits and rewards
    _case(
        "turns_without_a_limit",
        "--environment_factory envs.py:Sums --completion_length_limit_scope per_round",
    ),
    _case("reward_of_no_environment", "", reward="environment"),
    _case("reward_of_no_environment_beside_another", "--max_turns 3", reward="accuracy environment"),
    _case(
        "reward_of_an_environment_that_gives_none",
        "--environment_factory envs.py:Silent --chat_template chatml-tools",
        reward="accuracy environment",
    ),
    # -- environments
    _case("environment_that_does_not_exist", "--environment_factory envs.py:Sum"),
    _case("environment_without_reset", "--environment_factory envs.py:NoReset"),
    _case("environment_that_raises", "--environment_factory envs.py:Raises"),
    _case("environment_that_wants_more", "--environment_factory envs.py:WantsMore"),
    _case(
        "environment_with_a_method_without_types",
        "--environment_factory envs.py:NoHints --chat_template chatml-tools",
    ),
    # -- schedulers of ms-swift
    _scheduler("scheduler_that_nobody_registers", "tip_trick", has_plugin=False),
    _scheduler("scheduler_beside_a_plugin_without_it", "raise"),
    _scheduler("scheduler_that_raises", "raises"),
    _scheduler("scheduler_whose_hook_raises", "forgets"),
    _scheduler("scheduler_that_begins_a_group_differently", "draws"),
    _scheduler("scheduler_whose_environment_raises", "gym_scheduler", "--gym_env board"),
    _scheduler("gym_environment_that_nobody_registers", "gym_scheduler", "--gym_env bord"),
    _scheduler(
        "scheduler_beside_other_turns",
        "draws",
        "--tools tools.py:add --environment_factory envs.py:Sums --rollout_func rollouts.py:play "
        "--chat_template chatml-tools",
    ),
    Case(
        name="scheduler_without_a_reward",
        words="train --model quickstart --dataset sums.jsonl --multi_turn_scheduler thinking_tips_scheduler",
    ),
    _scheduler(
        "scheduler_without_a_limit", "thinking_tips_scheduler", "--completion_length_limit_scope per_round"
    ),
    # -- rollout functions
    _case("rollout_function_that_does_not_exist", "--rollout_func rollouts.py:pla", files=_ROLLOUTS),
    _case("rollout_function_by_a_word", "--rollout_func play", files=_ROLLOUTS),
    _case("rollout_function_of_three_arguments", "--rollout_func rollouts.py:of_three", files=_ROLLOUTS),
    _case(
        "rollout_function_beside_other_turns",
        "--rollout_func rollouts.py:play --tools tools.py:add --environment_factory envs.py:Sums "
        "--chat_template chatml-tools",
        files=_ROLLOUTS,
    ),
    _case(
        "rollout_function_ahead",
        "--rollout_func rollouts.py:play --max_turns 3 --max_staleness 1",
        files=_ROLLOUTS,
    ),
)
