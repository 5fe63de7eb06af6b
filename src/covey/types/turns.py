"""Records an episode of several turns: calls of tools, their results, and what followed each turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class CallFailure(StrEnum):
    """Names the reason why a call of a tool gave no result.

    `UNREADABLE`: the text of the call cannot be parsed. `UNKNOWN`: no tool has this name. `ARGUMENTS`: they
    do not fit its signature. `RAISED`: the function raised. `TIMEOUT`: it ran into its time limit. `ENDED`:
    it ended its process, or ran out of memory.
    """

    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    ARGUMENTS = "arguments"
    RAISED = "raised"
    TIMEOUT = "timeout"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFault:
    """Says why a function cannot be a tool, or a class not an environment.

    `kind` is "missing", "import", "no_hints", "no_docstring", "signature" or "environment"; `words` say what
    it is.
    """

    entry: str
    kind: str
    words: str
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote: `ToolCall(name="calculate", arguments={"expression": "2*3"})`.

    `text` is what it wrote, marks included. `fault` says why the text is no call; name and arguments are
    empty then.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The text that a call gave, or that says why it failed: `ToolResult(name="calculate", content="6")`.

    `images` are those of its result as JSON, in the order of the marks (`data.messages.MARK`) in the text.
    """

    name: str
    content: str
    images: tuple[Mapping[str, Any], ...] = ()
    failure: CallFailure | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of the model and what followed it.

    `opened` is what the template had begun of the turn, `text` what the model wrote, and `content` both of
    them without the calls. `results` has one entry a call that was made; `answer` are the messages that
    follow, as the template was given them. `reward` is what the environment gave for the turn (None:
    nothing), `seconds` the time that tools and environment took. `number` is that of the request which the
    engine was given, `digest` that of the tokens which it sampled and which have stayed; `num_left_out` of
    these are not trained, as a scheduler or loss_scale asks for. `cut_ids` are tokens that were sampled
    behind them and that a scheduler has cut, `is_truncated` says that the turn ran into a limit of tokens.
    """

    text: str
    opened: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    answer: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    seconds: float = 0.0
    number: int = 0
    digest: int = 0
    num_left_out: int = 0
    cut_ids: tuple[int, ...] = ()
    is_truncated: bool = False

    def messages(self) -> list[dict[str, Any]]:
        """Return the turn and what followed it as messages, calls apart from the text."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
            if not call.fault
        ]
        turn = {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}
        return [turn, *map(dict, self.answer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """Counts the turns of an episode, known to every rank: how many there are (0: it has neither tools nor an
    environment), how many calls of tools were answered, and how many of these failed."""

    num_turns: int = 0
    num_calls: int = 0
    num_failed_calls: int = 0

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> TurnCounts:
        """Count the turns of an episode."""
        results = [result for turn in turns for result in turn.results]
        failed = sum(result.failure is not None for result in results)
        return cls(num_turns=len(turns), num_calls=len(results), num_failed_calls=failed)
