"""The rewards that need no file: covey's own, and those of ms-swift and TRL by the names they have there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from covey.rewards.accuracy import accuracy, reasoning_accuracy
from covey.rewards.fenced import has_named_program
from covey.rewards.formats import format_reward, react_format, tag_count, think_format_reward
from covey.rewards.lengths import cosine, soft_overlong
from covey.rewards.repetition import repetition, repetition_of_tokens
from covey.rewards.targets import Target
from covey.rewards.toolbench import toolbench
from covey.rewards.validity import json_valid, xml_valid
from covey.types import GOLD_COLUMNS

_TRLS_GOLD = ("solution",)
_TRL = "trl.rewards."

_COSINE = (
    "cosine_min_len_value_wrong",
    "cosine_max_len_value_wrong",
    "cosine_min_len_value_correct",
    "cosine_max_len_value_correct",
    "cosine_max_len",
    "gold_lists",
)
_ACCURACY = ("gold_lists",)
_REPETITION = ("repetition_n_grams", "repetition_max_penalty")
_OVERLONG = ("soft_max_length", "soft_cache_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A function, the options of the run that it is called with, and the columns that may hold its gold, of
    which the data has one; `parses_gold` where that is read as an answer."""

    function: Callable[..., list[float | None]]
    options: tuple[str, ...] = ()
    golds: tuple[str, ...] = ()
    parses_gold: bool = False


def code_format(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is what `format` asks for, with a fenced block that says `python` in the answer;
    else 0."""
    return [
        f if has_named_program(t) else 0.0
        for t, f in zip(completions, format_reward(completions=completions), strict=True)
    ]


BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "accuracy": BuiltIn(function=accuracy, options=_ACCURACY, golds=GOLD_COLUMNS, parses_gold=True),
        "accuracy_reward": BuiltIn(function=accuracy, options=_ACCURACY, golds=_TRLS_GOLD, parses_gold=True),
        "code_format": BuiltIn(function=code_format),
        "cosine": BuiltIn(function=cosine, options=_COSINE, golds=GOLD_COLUMNS, parses_gold=True),
        "format": BuiltIn(function=format_reward),
        "get_cosine_scaled_reward": BuiltIn(
            function=cosine, options=_COSINE, golds=_TRLS_GOLD, parses_gold=True
        ),
        "get_repetition_penalty_reward": BuiltIn(function=repetition_of_tokens, options=_REPETITION),
        "get_soft_overlong_punishment": BuiltIn(function=soft_overlong, options=_OVERLONG),
        "json_valid": BuiltIn(function=json_valid),
        "react_format": BuiltIn(function=react_format),
        "reasoning_accuracy": BuiltIn(
            function=reasoning_accuracy, options=_ACCURACY, golds=GOLD_COLUMNS, parses_gold=True
        ),
        "reasoning_accuracy_reward": BuiltIn(
            function=reasoning_accuracy, options=_ACCURACY, golds=_TRLS_GOLD, parses_gold=True
        ),
        "repetition": BuiltIn(function=repetition, options=_REPETITION),
        "soft_overlong": BuiltIn(function=soft_overlong, options=_OVERLONG),
        "tag_count": BuiltIn(function=tag_count),
        "think_format_reward": BuiltIn(function=think_format_reward),
        "toolbench": BuiltIn(function=toolbench, golds=_TRLS_GOLD),
        "xml_valid": BuiltIn(function=xml_valid),
    }
)

# Their best score is 0.
PENALTIES = (
    *("repetition", "get_repetition_penalty_reward"),
    *("soft_overlong", "get_soft_overlong_punishment"),
)

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
