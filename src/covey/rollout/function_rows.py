"""Reads what a rollout function returns: one row of tokens for each prompt that it was given."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from covey.errors import CoveyError
from covey.rewards.arguments import STANDARD
from covey.texts import joined, tr

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK, LOGPROB_IDS = "env_mask", "logprob_token_ids"
ROUNDING = 1e-3
"""How far a log-probability may be from what it should be."""


class UnusableRows(CoveyError):
    """Says what is wrong with the rows that a rollout function has returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRow:
    """The tokens of an episode: `is_trained` is True for those of the completion that the model wrote, of
    which `logprobs` has one each. `columns` go to the rewards."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    columns: Mapping[str, Any]


def rows_of(
    output: Any, num_rows: int, num_generations: int, *, vocab: int, context: int | None
) -> list[FunctionRow]:
    """Return the rows of what a function has returned for `num_rows` prompts; UnusableRows says what is wrong
    with it. `vocab` and `context` are what the model has."""
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        names = joined(", ", REQUIRED)
        raise UnusableRows(tr("it returned a {kind}, not a dict with {names}", kind=kind, names=names))
    missing = [name for name in REQUIRED if output.get(name) is None]
    if missing:
        raise UnusableRows(
            tr(
                "its dict lacks {missing}; it has {names}",
                missing=joined(", ", missing),
                names=joined(", ", sorted(map(str, output))) or tr("nothing"),
            )
        )
    lists = {name: _column(output, name, num_rows, num_generations) for name in REQUIRED}
    optional = {
        name: _column(output, name, num_rows, num_generations)
        for name in (MASK, LOGPROB_IDS)
        if output.get(name) is not None
    }
    columns = _columns(output, num_rows)
    nothing = [None] * num_rows
    rows = []
    for number in range(num_rows):
        own = {name: values[number] for name, values in lists.items()}
        row = _Row(number, vocab, own["completion_ids"], optional.get(MASK, nothing)[number])
        prompt_ids = row.ids("prompt_ids", own["prompt_ids"])
        length = len(prompt_ids) + len(row.completion_ids)
        if context is not None and length > context:
            row.refuse(tr("it has {length} tokens, but the model holds {most}", length=length, most=context))
        rows.append(
            FunctionRow(
                prompt_ids=prompt_ids,
                completion_ids=row.completion_ids,
                is_trained=row.is_trained,
                logprobs=row.logprobs(own["logprobs"], optional.get(LOGPROB_IDS, nothing)[number]),
                columns={name: values[number] for name, values in columns.items()},
            )
        )
    return rows


def _column(output: Mapping[str, Any], name: str, num_rows: int, num_generations: int) -> Sequence[Any]:
    """Return a value for each prompt."""
    values = _as_list(output[name])
    if not isinstance(values, list):
        kind = type(values).__name__
        raise UnusableRows(tr("{name} is a {kind}, not a list with one entry a prompt", name=name, kind=kind))
    if len(values) != num_rows:
        raise UnusableRows(
            tr(
                "{name} has {num} entries for {num_rows} prompts; each prompt is given {num_generations} "
                "times, once for each completion, and has one entry each time",
                name=name,
                num=len(values),
                num_rows=num_rows,
                num_generations=num_generations,
            )
        )
    return values


def _columns(output: Mapping[str, Any], num_rows: int) -> dict[str, list[Any]]:
    """Return what goes to the rewards, a value for each prompt; what is no list is the same for all."""
    found = {}
    for name, value in output.items():
        if name in (*REQUIRED, MASK, LOGPROB_IDS):
            continue
        if name in STANDARD:
            raise UnusableRows(
                tr("{name} cannot be a column for the rewards: covey gives them its own", name=name)
            )
        values = _as_list(value)
        if isinstance(values, list) and len(values) != num_rows:
            raise UnusableRows(
                tr(
                    "{name} has {num} values for {num_rows} prompts; give one for each, or one for all that "
                    "is no list",
                    name=name,
                    num=len(values),
                    num_rows=num_rows,
                )
            )
        found[str(name)] = values if isinstance(values, list) else [value] * num_rows
    return found


class _Row:
    """Reads one row; what is wrong is said with its number."""

    def __init__(self, number: int, vocab: int, completion_ids: Any, mask: Any) -> None:
        self._number, self._vocab = number, vocab
        self.completion_ids = self.ids("completion_ids", completion_ids)
        self.is_trained = self._mask(mask)

    def refuse(self, words: str) -> NoReturn:
        """Raise UnusableRows for this row."""
        raise UnusableRows(tr("row {number}: {words}", number=self._number, words=words))

    def ids(self, name: str, given: Any) -> tuple[int, ...]:
        """Return token ids, at least one, all of the vocabulary."""
        ids = self._numbers(name, given, operator.index)
        if not ids:
            self.refuse(tr("{name} is empty", name=name))
        if others := [i for i in ids if not 0 <= i < self._vocab]:
            self.refuse(
                tr(
                    "{name} has the id {id}, which is not one of the {vocab} tokens of the model",
                    name=name,
                    id=others[0],
                    vocab=self._vocab,
                )
            )
        return tuple(ids)

    def _mask(self, given: Any) -> tuple[bool, ...]:
        if given is None:
            return (True,) * len(self.completion_ids)
        values = self._numbers(MASK, given, int)
        if len(values) != len(self.completion_ids):
            self._refuse_length(MASK, len(values))
        if {*values} - {0, 1}:
            self.refuse(tr("{name} has values other than 0 and 1", name=MASK))
        if not any(values):
            self.refuse(tr("{name} is 0 for each token, so none is trained", name=MASK))
        return tuple(map(bool, values))

    def logprobs(self, given: Any, of_ids: Any) -> tuple[float, ...]:
        """Return one log-probability for each token of the model; the function may have given one for each
        token of the completion."""
        values = _as_list(given)
        if not isinstance(values, list):
            self.refuse(tr("{name} is a {kind}, not a list", name="logprobs", kind=type(values).__name__))
        num_trained = sum(self.is_trained)
        if len(values) not in (len(self.completion_ids), num_trained):
            self._refuse_length("logprobs", len(values))
        if len(values) == len(self.completion_ids):
            places = [n for n, is_trained in enumerate(self.is_trained) if is_trained]
            others = None if of_ids is None else _as_list(of_ids)
            if others is not None and len(others) != len(values):
                self._refuse_length(LOGPROB_IDS, len(others))
            values = [self._own(n, values[n], None if others is None else others[n]) for n in places]
        found = self._numbers("logprobs", values, float)
        for place, value in enumerate(found):
            if not math.isfinite(value) or value > ROUNDING:
                self.refuse(
                    tr(
                        "the log-probability of token {place} of the model is {value:g}; it has to be "
                        "finite and not above 0",
                        place=place,
                        value=value,
                    )
                )
        return tuple(found)

    def _own(self, place: int, value: Any, ids: Any) -> Any:
        """Return the log-probability of a token, of which vLLM gives a list with that of other tokens too."""
        token = self.completion_ids[place]
        listed, ids = _as_list(value), _as_list(ids)
        if not isinstance(listed, list):
            if ids not in (None, token):
                self._refuse_other(place, token)
            return value
        if ids is None and len(listed) == 1:
            return listed[0]
        if not isinstance(ids, list) or len(ids) != len(listed) or token not in ids:
            self._refuse_other(place, token)
        return listed[ids.index(token)]

    def _refuse_other(self, place: int, token: int) -> NoReturn:
        self.refuse(
            tr(
                "of token {place} of completion_ids, {token}, logprobs and logprob_token_ids have no "
                "log-probability",
                place=place,
                token=token,
            )
        )

    def _refuse_length(self, name: str, num: int) -> NoReturn:
        self.refuse(
            tr(
                "{name} has {num} entries, but completion_ids has {length}",
                name=name,
                num=num,
                length=len(self.completion_ids),
            )
        )

    def _numbers(self, name: str, given: Any, read: Callable[[Any], Any]) -> list[Any]:
        values = _as_list(given)
        try:
            return [read(value) for value in values]
        except (TypeError, ValueError):
            self.refuse(tr("{name} is not a list of numbers", name=name))


def _as_list(value: Any) -> Any:
    """Return lists for tensors, arrays and tuples; anything else as it is."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return tolist()
    return list(value) if isinstance(value, tuple) else value
