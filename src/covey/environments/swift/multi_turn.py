"""Schedulers of ms-swift (`swift.rollout.multi_turn`): a class says what follows each turn of the model."""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any

from covey.environments.swift.protocol import (
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    remove_response,
)
from covey.texts import tr


async def finished(value: Any) -> Any:
    """Return what a method gave, sync or async."""
    return await value if inspect.isawaitable(value) else value


class RolloutScheduler(ABC):  # noqa: B024 - a subclass overrides what it needs
    """Makes a trajectory: by default one turn. Hooks may be sync or async."""

    def __init__(
        self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self._tokenizer = kwargs.get("tokenizer")

    @property
    def engine(self) -> Any:
        """Return what asks the model."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the model, as transformers loads it."""
        return self.infer_engine.tokenizer if self._tokenizer is None else self._tokenizer

    def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Change the requests before the first turn."""
        return None

    def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Return `{"done": …, "rollout_infos": {…}}`, both optional, after a turn."""
        return {}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """Make a trajectory of one turn."""
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        ids = list(response.choices[0].token_ids)
        return RolloutOutput(
            response=response,
            messages=infer_request.messages,
            response_token_ids=[ids],
            response_loss_mask=[[1] * len(ids)],
            rollout_infos={"num_turns": 1},
        )


class MultiTurnScheduler(RolloutScheduler, ABC):
    """Makes a trajectory of several turns: a subclass has `step`, or overrides `run`."""

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """Ask for turns until `on_turn_end`, `check_finished` or `max_turns` ends the trajectory."""
        request = infer_request
        await finished(self.on_trajectory_start([request]))
        remove_response(request.messages)
        made, turn = _Made(), 0
        while True:
            turn += 1
            response = await self.infer_engine.infer_async(request, request_config, **kwargs)
            choice = response.choices[0]
            made.begin(_add_reply(request.messages, choice.message.content))
            told = await finished(self.on_turn_end(request, choice, turn)) or {}
            made.infos.update(told.get("rollout_infos") or {})
            is_done = await finished(self.check_finished(request, choice, turn))
            if told.get("done", is_done) or (self.max_turns and turn >= self.max_turns):
                made.add(choice, {})
                made.infos["num_turns"] = turn
                if not request.messages[-1]["content"]:
                    # There was no room for a turn.
                    request.messages.pop()
                return made.output(response, request.messages)
            own = await finished(self.step(request, choice, turn))
            made.add(choice, own)
            made.infos.update(own.get("rollout_infos") or {})
            request = own["infer_request"]

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Return `{"infer_request": …}` for the next turn; with it, optionally, `response_token_ids`,
        `response_loss_mask`, `rollout_logprobs` and `rollout_infos` of this one."""
        raise NotImplementedError(
            tr("{name} has neither a method step nor a run of its own", name=type(self).__name__)
        )

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        """Return whether the trajectory is over: the turn was cut, or is the last one."""
        is_last = bool(self.max_turns and current_turn >= self.max_turns)
        return response_choice.finish_reason == "length" or is_last

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Any) -> list[float]:
        """Return the log-probabilities of a turn; schedulers written for ms-swift call this."""
        return logprobs_of(response_choice)


def logprobs_of(choice: Any) -> list[float]:
    """Return the log-probabilities of the tokens of a turn."""
    return [token["logprob"] for token in (choice.logprobs or {}).get("content", ())]


def _add_reply(messages: Messages, text: str) -> bool:
    """Add a turn to messages; returns whether it goes on with what the assistant has said before."""
    if messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        # A scheduler may keep a place for what it asks for.
        messages.pop()
    if messages[-1]["role"] == "assistant":
        messages[-1]["content"] += text
        return True
    messages.append({"role": "assistant", "content": text})
    return False


class _Made:
    """Gathers what the turns of a trajectory gave."""

    def __init__(self) -> None:
        self.infos: dict[str, Any] = {}
        self._ids: list[list[int]] = []
        self._masks: list[list[int]] = []
        self._logprobs: list[list[float]] = []

    def begin(self, goes_on: bool) -> None:
        """Begin a turn, or go on with the former one."""
        if not goes_on or not self._ids:
            self._ids.append([])
            self._masks.append([])
            self._logprobs.append([])

    def add(self, choice: Any, own: Any) -> None:
        """Add a turn as it was sampled, or as `step` returned it."""
        ids = list(own.get("response_token_ids") or choice.token_ids or ())
        mask = own.get("response_loss_mask")
        if mask and "response_token_ids" not in own:
            raise ValueError(tr("step() returned response_loss_mask without response_token_ids"))
        if mask and len(mask) != len(ids):
            raise ValueError(
                tr(
                    "step() returned response_loss_mask with {num} entries for {tokens} tokens",
                    num=len(mask),
                    tokens=len(ids),
                )
            )
        self._ids[-1] += ids
        self._masks[-1] += list(mask) if mask else [1] * len(ids)
        self._logprobs[-1] += own.get("rollout_logprobs") or logprobs_of(choice)

    def output(self, response: Any, messages: Messages) -> RolloutOutput:
        """Return the trajectory."""
        return RolloutOutput(
            response=response,
            messages=messages,
            response_token_ids=self._ids,
            response_loss_mask=self._masks,
            rollout_infos=self.infos,
            rollout_logprobs=self._logprobs,
        )
