"""The rewards that need no file: covey's own, and TRL's by the names they have there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from covey.rewards.accuracy import accuracy
from covey.rewards.fenced import has_named_program
from covey.rewards.targets import Target

_FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)
_THINK = re.compile(r"<think>(?:(?!</?think>).)*</think>(?:(?!<think>).)*", re.DOTALL)
_TRL = "trl.rewards."


def format_reward(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is `<think>…</think><answer>…</answer>`, each tag once and nothing around them;
    else 0."""
    return [float(_FORMAT.fullmatch(text) is not None) for text in completions]


def accuracy_reward(
    *,
    completions: Sequence[str],
    solution: Sequence[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    """TRL's name for `accuracy`; its gold is the column `solution` alone."""
    return accuracy(completions=completions, solution=solution, log_extra=log_extra)


def think_format_reward(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion starts with one `<think>…</think>`, whatever follows that opens no second; else
    0."""
    return [float(_THINK.fullmatch(text) is not None) for text in completions]


def code_format(*, completions: Sequence[str]) -> list[float | None]:
    """1 where a completion is what `format` asks for, with a fenced block that says `python` in the answer;
    else 0."""
    return [
        f if has_named_program(t) else 0.0
        for t, f in zip(completions, format_reward(completions=completions), strict=True)
    ]


BUILT_IN: Mapping[str, Callable[..., list[float | None]]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "accuracy_reward": accuracy_reward,
        "code_format": code_format,
        "format": format_reward,
        "think_format_reward": think_format_reward,
    }
)

# These take long or start programs, and run in the workers.
IN_WORKERS: Mapping[str, Target] = MappingProxyType(
    {"code_reward": Target(entry="code_reward", name="CodeReward", module="covey.rewards.code")}
)


def built_in_name(entry: str) -> str | None:
    """The built-in that an entry of `reward_funcs` means; `trl.rewards.x` is TRL's way to write `x`."""
    name = entry.removeprefix(_TRL)
    return name if name in BUILT_IN and (name == entry or name.endswith("_reward")) else None
