"""`generate_rollout_completions`, with which rollout functions written for TRL sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample a completion behind each prompt, as `trainer.generate` does, with the same results.

    Prompts say themselves whether they are messages or text; `as_chat` may say the same.
    """
    return list(trainer.generate(prompts, as_chat=as_chat, **(generation_overrides or {})))
