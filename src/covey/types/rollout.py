"""From a prompt to a group of scored trajectories: what is asked of an engine, what it gives, and what the
rewards say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any


class Source(StrEnum):
    """Who wrote the tokens of a segment."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"
    ENVIRONMENT = "environment"


class Finish(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(StrEnum):
    """What became of a reward call."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which pass over the data and which rollout took a prompt: `Origin(epoch=0, rollout=12)`.

    `attempt` counts the further prompts that were taken for the same rollout, 0 for its first ones.
    """

    epoch: int
    rollout: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, rendered and tokenised.

    `Prompt(id=7, messages=({"role": "user", "content": "What is 1+2?"},), text="<|im_start|>user…",
    token_ids=(256, 5), columns={"solution": "3"}, origin=Origin(epoch=0, rollout=0))`. `id` is the row's
    number in its source; `columns` goes to the rewards. `opened` is what the rendered prompt has already
    written of the assistant's turn, `<think>` for some models, or the content of a last message of the
    assistant, which the completion continues: rewards read it before the completion's text.
    `task` is "" where rows have none, and `pass_rate` is None where nobody measured it. `checksum` is of the
    messages, where these are not kept. `token_ids` are a tuple once a rollout has taken the prompt; a table
    of all prompts holds arrays.
    """

    id: int
    messages: tuple[Mapping[str, Any], ...] | None
    text: str
    token_ids: Sequence[int]
    columns: Mapping[str, Any]
    origin: Origin
    task: str = ""
    opened: str = ""
    media: tuple[Any, ...] = ()
    pass_rate: float | None = None
    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a completion is drawn: `SamplingParams(temperature=1.0, max_new_tokens=64,
    stop_token_ids=(257,))`."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKey:
    """What the sampling noise of one completion is a pure function of, together with position and token
    id."""

    seed: int
    split: str
    rollout: int
    attempt: int
    prompt_id: int
    sibling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample. Requests with equal prompt tokens share one prefill where the engine can."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    noise_key: NoiseKey
    media: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine gives back for one request; `logprobs` are of the sampled tokens at the sampling
    temperature."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An engine's confirmation that it serves `version`; `fingerprints` are the checksums of the tensors that
    it holds, read back from it by name, and empty where weights are shared, not copied. `unread` names
    tensors that it holds in a form which cannot be read back: its logprobs alone vouch for those.

    An engine made of several gives one receipt for each, by name, in `members`.
    """

    version: int
    fingerprints: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    members: Mapping[str, Receipt] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens from one source; logprobs and versions only for the model's own tokens."""

    token_ids: tuple[int, ...]
    source: Source
    trained: bool
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What one draw from the policy did; a plain completion is a prompt segment and one model segment.

    `text` is the decoded model output, for rewards and people; nothing is trained from it.
    """

    segments: tuple[Segment, ...]
    sampling: SamplingParams
    noise_key: NoiseKey
    finish: Finish
    text: str
    seconds: float = 0.0

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """Token ids after the prompt segment."""
        written = [s.token_ids for s in self.segments if s.source is not Source.PROMPT]
        return written[0] if len(written) == 1 else tuple(chain.from_iterable(written))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and its trajectories, in sibling order; `invalid` maps a sibling to the reason it is left
    out."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    planned: int
    invalid: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """One reward's result for one trajectory; value None means "not for this row".

    `steps` are the numbers of a process reward, one per step of the completion, of which `value` is the mean.
    `message` says why it failed; with status OK, why the call with several rows did, before this row alone.
    """

    name: str
    value: float | None
    status: Status = Status.OK
    message: str = ""
    steps: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """Where the steps of a completion end, and how the rewards of its steps count beside the others.

    `StepSpans(ends=(4, 9), weights=(1.0, 0.2), outcome=1.0)`: the first step is the completion's first 4
    tokens, the second the 5 behind them; the parts have these weights, and those that gave one number add up
    to 1 (None: there is none).
    """

    ends: tuple[int, ...]
    weights: tuple[float, ...]
    outcome: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The weighted total and its parts; total None means that no reward gave a value or that one failed.

    `extras` are what rewards noted beside their values, JSON by name: `{"parsed_by": "boxed"}`. `steps` is
    there where a reward gave one number per step.
    """

    total: float | None
    parts: tuple[ScorePart, ...]
    status: Status = Status.OK
    message: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    steps: StepSpans | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one score per trajectory, in sibling order."""

    group: Group
    scores: tuple[Score, ...]
