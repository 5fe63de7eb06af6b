"""From a prompt to a group of scored episodes: the rows of the data, and what the rewards say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from covey.types.arrays import ints
from covey.types.episode import Episode, Outcome, digest_of
from covey.types.media import Medium


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
    messages, where these are not kept. `rendered_with` is what the template was given beside the messages:
    `tools`, and the row's `arguments`. `token_ids` are a tuple once a rollout has taken the prompt; a table
    of all prompts holds arrays. `media` are the images of the prompt, in the order of their placeholders.
    """

    id: int
    messages: tuple[Mapping[str, Any], ...] | None
    text: str
    token_ids: Sequence[int]
    columns: Mapping[str, Any]
    origin: Origin
    task: str = ""
    opened: str = ""
    media: tuple[Medium, ...] = ()
    pass_rate: float | None = None
    checksum: str = field(default="", compare=False)
    rendered_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """Return 64 bits of BLAKE2b over the int32 token ids, and the keys of the images."""
        return digest_of(ints(self.token_ids), self.media)


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
class Group:
    """A prompt and its episodes, in sibling order."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    planned: int

    @property
    def lost(self) -> frozenset[int]:
        """The siblings that infrastructure failures leave out: those that have no episode, and all of them
        where fewer than two are left to compare."""
        lost = frozenset(i for i, e in enumerate(self.episodes) if e.outcome is Outcome.INFRASTRUCTURE)
        is_group_lost = lost and len(self.episodes) - len(lost) < 2
        return frozenset(range(len(self.episodes))) if is_group_lost else lost


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """Holds the result of one reward for one episode; a `value` of None says that the reward does not apply.

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

    `StepSpans(ends=(4, 9), weights=(1.0, 0.2), outcome=1.0)`: the first step is the first 4 trained tokens of
    the completion, the second the 5 behind them; the parts have these weights, and those that gave one number
    add up to 1 (None: there is none).
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
    """A group with one score per episode, in sibling order."""

    group: Group
    scores: tuple[Score, ...]
