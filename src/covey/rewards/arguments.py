"""The keyword arguments of a reward: TRL's, ms-swift's and the data set's columns, one entry a row."""

from __future__ import annotations

import datetime
import decimal
import json
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from covey.rewards.callee import Wants
from covey.rewards.images import NAMES, told, told_pil
from covey.rewards.protocol import Form, Scored
from covey.texts import tr
from covey.types import Outcome

# What a function may name whatever the data holds; the last three are made where the function is called.
STANDARD = (
    "prompts",
    "completions",
    "completion_steps",
    "completion_ids",
    "messages",
    "response_token_ids",
    "finish_reason",
    "is_truncated",
    "environment_reward",
    "num_turns",
    "turns",
    "prompt_id",
    "trainer_state",
    "log_extra",
    "log_metric",
)
# Where data have columns of these names, and episodes have one turn, the columns are meant.
_OF_TURNS: Mapping[str, Callable[[Scored], Any]] = {
    "num_turns": lambda row: len(row.turns),
    "turns": lambda row: [asdict(turn) for turn in row.turns],
}
# What takes time to make, or few have, goes to those who name it, not to whoever takes everything.
_ONLY_NAMED = ("completion_steps", "environment_reward", "environments", *NAMES, *_OF_TURNS)
_AS_TEXT = (decimal.Decimal, uuid.UUID, pathlib.PurePath)


class Unsendable(TypeError):
    """A column holds what JSON has no word for."""


def arguments_of(
    rows: Sequence[Scored], form: Form, wants: Wants, step_separator: str
) -> dict[str, list[Any]]:
    """Return the arguments that the function wants of these rows, by name; a column never replaces a sample.

    In the form `text` prompts and completions are strings, in the form `messages` lists of messages. Steps
    are strings in both. Images are told of, as `rewards.images` opens them again.
    """
    readers = {
        "prompts": lambda r: _messages(r, r.prompt.messages) if form == "messages" else r.prompt.text,
        "completions": lambda r: r.spoken if form == "messages" else r.text,
        "completion_steps": lambda r: r.steps(step_separator),
        "completion_ids": lambda r: r.episode.completion_ids,
        "messages": lambda r: r.conversation,
        "response_token_ids": lambda r: r.episode.completion_ids,
        "finish_reason": lambda r: r.episode.outcome.value,
        "is_truncated": lambda r: r.episode.outcome is Outcome.TRUNCATED,
        "environment_reward": lambda r: r.episode.environment_reward,
        # The key of each: the objects are where the function is called.
        "environments": lambda r: r.episode.environment,
        "prompt_id": lambda r: str(r.prompt.id),
        **_OF_TURNS,
    }
    own = {name for r in rows for name in r.prompt.columns}
    # A function that names them is given none of rows without, whatever rows it is called with.
    if any(r.prompt.media for r in rows) or (set(wants.names) - own) & {*NAMES}:
        readers["images"] = lambda r: [*map(told, r.prompt.media)]
        readers["image"] = lambda r: told(r.prompt.media[0]) if r.prompt.media else None
    if not any(r.episode.turns for r in rows):
        readers = {name: read for name, read in readers.items() if name not in _OF_TURNS.keys() & own}
    columns = sorted(own - {*STANDARD, *readers} | (own & _OF_TURNS.keys() - readers.keys()))
    hidden = {*_ONLY_NAMED} - ({"num_turns"} if any(r.episode.turns for r in rows) else set())
    names = [n for n in readers if n in wants.names or (wants.takes_all and n not in hidden)]
    values = {name: [readers[name](r) for r in rows] for name in names}
    values.update({n: [r.prompt.columns.get(n) for r in rows] for n in columns if wants.includes(n)})
    return values


def as_json(arguments: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Each argument as JSON text; dates, decimals and paths go as text, an array as a list, and of anything
    else the column and the type are named."""
    texts = {}
    for name, values in arguments.items():
        try:
            texts[name] = json.dumps(values, default=plain_value)
        except (TypeError, ValueError) as error:
            raise Unsendable(
                tr("the column {name} cannot be passed to a reward: {error}", name=name, error=error)
            ) from error
    return texts


def _messages(row: Scored, messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    if messages is None:
        return [{"role": "user", "content": row.prompt.text}]
    return [dict(m) for m in messages]


def plain_value(value: Any) -> Any:
    """Return a value as JSON can hold it; a TypeError names a type that has no such form."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if (image := told_pil(value)) is not None:
        return image
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return tolist()
    raise TypeError(
        tr("it contains a {module}.{name}", module=type(value).__module__, name=type(value).__name__)
    )
