"""What a reward receives, what it returns, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from covey.rewards.steps import steps_of
from covey.texts import packed, unpacked
from covey.types import Episode, Metric, Prompt, RewardCause, RewardFault, ScorePart, Turn

Form = Literal["text", "messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One completion as a reward receives it."""

    prompt: Prompt
    episode: Episode

    @classmethod
    def of(cls, prompt: Prompt, episode: Episode) -> Scored:
        """Take the prompt of the data, or the one that an environment has made of it, and the columns that a
        rollout function has added."""
        if episode.prompt_messages is not None:
            prompt = replace(prompt, messages=episode.prompt_messages, text=episode.prompt_text)
        elif episode.prompt_text and not episode.prompt_text.endswith(prompt.opened):
            # A rollout function has written another prompt, which opens nothing.
            prompt = replace(prompt, opened="")
        if episode.columns:
            prompt = replace(prompt, columns={**prompt.columns, **episode.columns})
        return cls(prompt=prompt, episode=episode)

    @property
    def opened(self) -> str:
        """Return the part of the last turn that the template wrote, such as `<think>`."""
        return self.episode.turns[-1].opened if self.episode.turns else self.prompt.opened

    @property
    def text(self) -> str:
        """The assistant's last turn as a reader would see it: what the template opened, then what was
        sampled."""
        return self.opened + self.episode.text

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the assistant; without tools and environment the completion is the only one."""
        text = self.episode.text
        return self.episode.turns or (Turn(text=text, opened=self.opened, content=self.text),)

    @property
    def spoken(self) -> list[dict[str, Any]]:
        """All that follows the prompt as messages: turns of the assistant, their calls, and the results. Of a
        conversation that a scheduler has rewritten it is the last turn."""
        written = self.episode.messages
        if written is not None:
            before = self.before or ()
            is_behind = tuple(written[: len(before)]) == tuple(before)
            return [dict(message) for message in (written[len(before) :] if is_behind else written[-1:])]
        return [message for turn in self.turns for message in turn.messages()]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return the prompt as messages, and all that follows."""
        if self.episode.messages is not None:
            return [dict(message) for message in self.episode.messages]
        asked = ({"role": "user", "content": self.prompt.text},) if self.before is None else self.before
        return [*map(dict, asked), *self.spoken]

    @property
    def before(self) -> tuple[Mapping[str, Any], ...] | None:
        """The messages before the assistant's turn, of which the last one of the prompt may be the beginning;
        None where the prompt is text."""
        messages = self.prompt.messages
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages

    def steps(self, separator: str) -> list[str]:
        """The text in steps; what the prompt opened is of the first. With tools or an environment
        each turn is a step."""
        if self.episode.turns:
            return [turn.opened + turn.text for turn in self.episode.turns]
        pieces = steps_of(self.episode.text, separator)
        return [self.opened + pieces[0], *pieces[1:]] if pieces else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the run is, for rewards that change with it (`trainer_state`)."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


def packed_fault(fault: RewardFault) -> dict[str, Any]:
    """A fault as JSON holds it, with the template of its words."""
    return {**asdict(fault), "words": packed(fault.words)}


def unpacked_fault(value: Mapping[str, Any]) -> RewardFault:
    """The fault that `packed_fault` made this of."""
    return RewardFault(
        **{**value, "words": unpacked(value["words"]), "lacking": tuple(value.get("lacking", ()))}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWord:
    """One reward's result for one row, what it noted beside it (`log_extra`), and why it failed."""

    part: ScorePart
    extras: Mapping[str, Any]
    cause: RewardCause = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One reward's results for some rows; `metrics` has one value per call that gave one (`log_metric`)."""

    rows: tuple[RowWord, ...]
    metrics: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """One row: a part per reward, in the order of the rewards, what they noted of it, JSON by name, and why
    each failed."""

    parts: tuple[ScorePart, ...]
    extras: Mapping[str, Any]
    causes: tuple[RewardCause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The results of all rewards for some rows; metrics are means over the calls that logged them."""

    rows: tuple[JudgedRow, ...]
    metrics: Mapping[str, Metric]


class Environments(Protocol):
    """Holds the environments of episodes, and calls rewards that read them in the same process."""

    def load_reward(self, reward: Any) -> Any:
        """Import a function; gives a `Loaded` of covey.rewards.pool, or a RewardFault."""
        ...

    def call_reward(
        self,
        number: int,
        arguments: Mapping[str, Sequence[Any]],
        keys: Sequence[int],
        state: TrainerState,
        limit_s: float,
    ) -> Any:
        """Call a loaded function with the environments of these keys; gives a Future of its reply."""
        ...

    def keep_all(self) -> None:
        """Keep environments until they are released, however many there are."""
        ...


class Reward(Protocol):
    """Scores completions; a failure is a status on its rows, never a number.

    One that `is_here` computes in this process, while it is waited for.
    """

    name: str
    is_here: bool

    def begin(self, rows: Sequence[Scored], state: TrainerState) -> Callable[[], Judgement]:
        """Start scoring; the function that comes back waits for the judgement and returns it."""
        ...

    def named(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Those of these columns that the function names among its arguments."""
        ...

    def lacks(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Arguments that the function demands and that neither covey nor these columns give."""
        ...
