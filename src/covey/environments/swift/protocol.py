"""Declares the requests of schedulers and their answers, as `swift.infer_engine.protocol` does."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]


@dataclass
class RequestConfig:
    """Holds the sampling settings; a scheduler may change `max_tokens` and `stop` alone."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    structured_outputs_regex: str | None = None


@dataclass
class InferRequest:
    """Holds the messages that the model goes on with; `<image>` in one stands for one of `images`."""

    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("images", "audios", "videos"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])

    @staticmethod
    def remove_response(messages: Messages) -> str | None:
        """Take the answer of the assistant from the end of messages; returns it."""
        return remove_response(messages)


@dataclass
class RolloutInferRequest(InferRequest):
    """Names a trajectory by `uuid`, and holds the columns of its row in `data_dict`."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class ChatMessage:
    """Holds a message of the model."""

    role: str
    content: Any
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """Holds a turn of the model: its text, the tokens that it sampled with the one that ended it, and their
    log-probabilities as `{"content": [{"logprob": -0.1}, …]}`."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    routed_experts: Any = None


@dataclass
class UsageInfo:
    """Counts tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    """Answers a request with one choice."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    images_size: list[Any] | None = None


@dataclass
class RolloutOutput:
    """Holds a trajectory, or a part of one that is trained by itself.

    `response_token_ids` and `response_loss_mask` have a list for each turn, `rollout_logprobs` a number for
    each token whose mask is 1. A flat list counts as one turn.
    """

    response: Any
    messages: Messages | None = None
    response_token_ids: list[list[int]] = field(default_factory=list)
    response_loss_mask: list[list[int]] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
            value = getattr(self, name)
            if value and isinstance(value[0], int | float):
                setattr(self, name, [value])


def remove_response(messages: Messages) -> str | None:
    """Take the answer of the assistant from the end of messages; returns it."""
    if messages and messages[-1]["role"] == "assistant":
        return messages.pop()["content"]  # type: ignore[no-any-return]
    return None
