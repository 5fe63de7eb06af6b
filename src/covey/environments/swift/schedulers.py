"""The schedulers that ms-swift has by name."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from typing import Any

from covey.environments.swift.gym_env import ENVS
from covey.environments.swift.multi_turn import MultiTurnScheduler, RolloutScheduler, finished, logprobs_of
from covey.environments.swift.protocol import (
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from covey.rewards.swift_standin import orm
from covey.texts import joined, tr


def _accuracy(given: Any) -> Any:
    """Return what says whether texts are right answers."""
    return orm("accuracy")() if given is None else given


class MathTipsScheduler(MultiTurnScheduler):
    """Goes on once with a wrong answer: it is cut before its answer, and a doubt is written behind it, which
    is not trained."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = _accuracy(kwargs.get("acc_function"))

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Return whether the answer is right, or was doubted before."""
        said = infer_request.messages[-1]["content"]
        if self.tips_prompt in said or self.acc_func([said], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Cut the turn, and write the doubt."""
        text = response_choice.message.content
        cuts = [place for mark in ("<answer>", "</think>") if (place := text.find(mark)) >= 0]
        kept = text[: min(cuts, default=len(text))]
        said = infer_request.messages[-1]["content"]
        infer_request.messages[-1]["content"] = said[: len(said) - len(text)] + kept + self.tips_prompt
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(MultiTurnScheduler):
    """Asks a model that thinks to check a wrong answer once. Each turn is an output of its own, whose history
    has no thoughts."""

    tips_prompt = "Your answer is not right. Check your reasoning very carefully, and answer again."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = _accuracy(kwargs.get("acc_function"))

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> list[RolloutOutput]:
        """Return an output for each turn."""
        outputs: list[RolloutOutput] = []
        messages = infer_request.messages
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(
                RolloutOutput(
                    response=response,
                    messages=[*map(_without_thought, messages[:-1]), messages[-1]],
                    response_token_ids=[list(choice.token_ids)],
                    rollout_infos={"num_turns": len(outputs) + 1},
                    rollout_logprobs=[logprobs_of(choice)],
                )
            )
            if await finished(self.check_finished(infer_request, choice, len(outputs))):
                return outputs
            infer_request = (await finished(self.step(infer_request, choice, len(outputs))))["infer_request"]
            messages = infer_request.messages

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Return whether the answer is right, or was doubted before."""
        asked = infer_request.messages[-2]["content"]
        text, solution = response_choice.message.content, infer_request.data_dict["solution"]
        if self.tips_prompt in asked or self.acc_func([text], [solution])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Ask the model to check its answer."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, str):
        return dict(message)
    return {**message, "content": content.rpartition("</think>")[2].strip()}


class GYMScheduler(MultiTurnScheduler):
    """Plays an environment: its first observation is the prompt, each turn goes to its `step`, and the sum of
    its rewards is that of the trajectory.

    The environment is that of `env_config["name"]` in the row, else `gym_env`. Subclasses of ms-swift's users
    read and write what is kept here for each trajectory, by its uuid.
    """

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.gym_env_name = kwargs.get("gym_env")
        self._envs: dict[Any, Any] = {}
        self._total_rewards: dict[Any, float] = {}
        self._step_rewards: dict[Any, list[float]] = {}
        self._pending_obs: dict[Any, str | None] = {}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """Play until the environment says that it is over; it is closed however that ends."""
        try:
            return await super().run(infer_request, request_config, **kwargs)
        finally:
            await self._close_and_remove(infer_request.uuid)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Begin an environment for each request."""
        for request in requests:
            own = request.data_dict.get("env_config") or {}
            config = {**getattr(self, "env_config_defaults", {}), **own}
            env = self._create_env(config)
            self._envs[request.uuid], self._total_rewards[request.uuid] = env, 0.0
            self._step_rewards[request.uuid], self._pending_obs[request.uuid] = [], None
            system, observation = await self._reset_env(env, request, config)
            before = [{"role": "system", "content": system}] if system else []
            request.messages = [*before, {"role": "user", "content": observation}]

    async def on_turn_end(
        self, infer_request: Any, response_choice: Any, current_turn: int
    ) -> dict[str, Any]:
        """Give the environment a turn."""
        env = self._envs.get(infer_request.uuid)
        if env is None:
            # A subclass has closed it.
            return {"done": True}
        uuid = infer_request.uuid
        following, reward, done = await self._step_env(env, infer_request, response_choice)
        self._step_rewards.setdefault(uuid, []).append(float(reward))
        self._total_rewards[uuid] = self._total_rewards.get(uuid, 0.0) + float(reward)
        self._pending_obs[uuid] = None if done else following
        infos = {
            "total_reward": self._total_rewards[uuid],
            "step_rewards": [*self._step_rewards[uuid]],
            "gym_done": bool(done),
        }
        return {"done": bool(done), "rollout_infos": infos}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Write what the environment says next."""
        said = self._pending_obs.get(infer_request.uuid)
        if said is not None:
            infer_request.messages.append({"role": "user", "content": said})
            self._pending_obs[infer_request.uuid] = None
        return {"infer_request": infer_request}

    async def _reset_env(
        self, env: Any, request: RolloutInferRequest, config: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the system prompt and the first observation of an environment."""
        observation, _, system = await finished(env.reset(request))
        return system, observation

    async def _step_env(self, env: Any, request: Any, choice: Any) -> tuple[Any, Any, Any]:
        """Return the next observation, the reward, and whether the trajectory is over."""
        following, reward, done, _ = await finished(env.step(deepcopy(request.messages)))
        return following, reward, done

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name", self.gym_env_name)
        if name not in ENVS:
            raise ValueError(
                tr(
                    "there is no gym environment {name!r}; the registry has: {names}",
                    name=name,
                    names=joined(", ", sorted(ENVS)),
                )
            )
        return ENVS[name](env_config)

    async def _close_and_remove(self, uuid: Any) -> None:
        """Close the environment of a trajectory, once, and forget what is kept of it."""
        env = self._envs.pop(uuid, None)
        for kept in (self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if env is not None:
            await self._close(env)

    async def _close(self, env: Any) -> None:
        await finished(env.close())


class OpenEnvScheduler(GYMScheduler):
    """Plays an OpenEnv environment on the server `env_config["base_url"]`; needs the package openenv.

    Its client blocks, so that it is called in threads.
    """

    def parse_action(self, text: str) -> dict[str, Any]:
        """Return what the environment is given of a turn: its JSON object, else `{"message": text}`."""
        body = text.strip()
        lines = body.splitlines()
        if len(lines) > 1 and body.startswith("```") and lines[-1].strip().startswith("```"):
            body = "\n".join(lines[1:-1])
        try:
            read = json.loads(body)
        except ValueError:
            return {"message": body}
        return read if isinstance(read, dict) else {"message": str(read)}

    def format_observation(self, observation: Any) -> str:
        """Return what the model is given of an observation."""
        return json.dumps(observation, ensure_ascii=False, default=str)

    async def _reset_env(
        self, env: Any, request: RolloutInferRequest, config: dict[str, Any]
    ) -> tuple[Any, Any]:
        observation, _ = await asyncio.to_thread(env.reset)
        return config.get("system_message", ""), self.format_observation(observation)

    async def _step_env(self, env: Any, request: Any, choice: Any) -> tuple[Any, Any, Any]:
        action = self.parse_action(choice.message.content)
        observation, reward, done, _ = await asyncio.to_thread(env.step, action)
        return self.format_observation(observation), reward, done

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def _close(self, env: Any) -> None:
        await asyncio.to_thread(env.close)


class OpenEnvWrapper:
    """Speaks to an OpenEnv server: `base_url`, and `reset_kwargs` for each reset."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = env_config.get("reset_kwargs", {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Connect and begin; returns the observation and what else the server says."""
        from openenv.core.generic_client import GenericEnvClient  # type: ignore[import-not-found]

        self._client = GenericEnvClient(base_url=self.base_url).sync()
        self._client.__enter__()
        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Take an action; returns the observation, the reward, whether it is over, and what else is said."""
        result = self._client.step(action)
        said = getattr(result, "metadata", None)
        return result.observation, float(result.reward or 0.0), bool(result.done), said

    def close(self) -> None:
        """Hang up."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)


SCHEDULERS: dict[str, type[RolloutScheduler]] = {
    "math_tip_trick": MathTipsScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
    "gym_scheduler": GYMScheduler,
    "openenv_scheduler": OpenEnvScheduler,
}
