"""The rewards that need no file, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import covey.rewards.built_in as package
from covey.modules import values_in
from covey.rewards.declare import BuiltIn
from covey.rewards.targets import Target

_TRL = "trl.rewards."

_FOUND = sorted(values_in(package, BuiltIn), key=lambda reward: reward.name)

BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType({reward.name: reward for reward in _FOUND})
"""The functions that run in this process, found in the files of `covey.rewards.built_in`."""

assert len(BUILT_IN) == len(_FOUND), "two rewards have the same name"

PENALTIES = tuple(reward.name for reward in _FOUND if reward.is_penalty)
"""Their best score is 0."""

# These take long or start programs, and run in the workers.
IN_WORKERS: Mapping[str, Target] = MappingProxyType(
    {"code_reward": Target(entry="code_reward", name="CodeReward", module="covey.rewards.code")}
)

JUDGE = "judge"
"""The reward that asks a service; a plugin's of this name takes its place."""

JUDGE_OPTIONS = (
    *("judge_base_url", "judge_model", "judge_prompt", "judge_regex"),
    *("judge_concurrency", "judge_retries", "judge_timeout_s"),
)


def built_in_name(entry: str) -> str | None:
    """The built-in that an entry of `reward_funcs` means; `trl.rewards.x` is TRL's way to write `x`."""
    name = entry.removeprefix(_TRL)
    is_trls = name.endswith("_reward") or name.startswith("get_")
    return name if name in BUILT_IN and (name == entry or is_trls) else None


def built_in_of(entry: str) -> BuiltIn | None:
    """The function that an entry means, with its options and columns; None where it means no built-in."""
    name = built_in_name(entry)
    return None if name is None else BUILT_IN[name]
