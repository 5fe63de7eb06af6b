"""Lists the classes and registries that the worker of a scheduler offers in place of ms-swift's."""

from __future__ import annotations

from typing import Any

from covey.environments.swift import gym_env, multi_turn, protocol, schedulers

_CLASSES = (
    *(multi_turn.RolloutScheduler, multi_turn.MultiTurnScheduler, schedulers.MathTipsScheduler),
    *(schedulers.ThinkingModelTipsScheduler, schedulers.GYMScheduler, schedulers.OpenEnvScheduler),
    *(schedulers.OpenEnvWrapper, gym_env.Env, protocol.RequestConfig, protocol.InferRequest),
    *(protocol.RolloutInferRequest, protocol.ChatMessage, protocol.ChatCompletionResponseChoice),
    *(protocol.UsageInfo, protocol.ChatCompletionResponse, protocol.RolloutOutput),
)


def offers() -> dict[str, Any]:
    """Return classes and registries by their names in ms-swift; plugin files fill the registries."""
    return {
        **{kind.__name__: kind for kind in _CLASSES},
        "Messages": protocol.Messages,
        "SimpleMathEnv": gym_env.MathEnv,
        "remove_response": protocol.remove_response,
        "envs": gym_env.ENVS,
        "multi_turns": schedulers.SCHEDULERS,
    }
