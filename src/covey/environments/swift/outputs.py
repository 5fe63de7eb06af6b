"""Reads what a scheduler returned of a trajectory: which of its tokens are trained, and what it notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.environments.protocol import Ended
from covey.environments.swift.trajectory import SampledTurn
from covey.errors import CoveyError
from covey.rewards.callee import number_of, plain
from covey.texts import tr

# The difference that the way through JSON and float32 may make.
_ROUNDING = 1e-4
_MEDIA = ("images", "videos", "audios")


class WrongOutput(CoveyError):
    """Says what is wrong with what a scheduler returned."""


def read_outputs(value: Any, turns: Sequence[SampledTurn], columns: Mapping[str, Any]) -> Ended:
    """Read one or several outputs, whose last one is what rewards see of the trajectory.

    Tokens that were not sampled are not trained whatever their mask says, and log-probabilities are those of
    the engine; where the outputs say otherwise, `notes` do. Raises WrongOutput.
    """
    outputs = list(value) if isinstance(value, list | tuple) else [value]
    if not outputs or not all(hasattr(output, "response") for output in outputs):
        raise WrongOutput(
            tr("returned {value} instead of a RolloutOutput or a list of them", value=f"{value!r:.80}")
        )
    masks: list[list[bool] | None] = [None] * len(turns)
    is_last = [False] * len(turns)
    notes: list[str] = []
    says_ids = True
    for number, output in enumerate(outputs):
        reading = _Reading(number, output, turns)
        ids = [list(one) for one in output.response_token_ids or ()]
        says_ids = says_ids and bool(ids)
        for turn, mask in reading.masks(ids).items():
            masks[turn] = [a or b for a, b in zip(masks[turn] or mask, mask, strict=True)]
        last = reading.last_turn()
        if last is not None:
            is_last[last] = True
        notes += reading.notes
    if not says_ids:
        masks = [[True] * len(t.token_ids) if m is None else m for m, t in zip(masks, turns, strict=True)]
    has_masks = any(output.response_loss_mask for output in outputs)
    whole = [m or [False] * len(t.token_ids) for m, t in zip(masks, turns, strict=True)]
    if turns and not any(map(any, whole)):
        raise WrongOutput(tr("returned masks that leave no token of the model to train"))
    infos = _infos(outputs[-1])
    return Ended(
        masks=tuple(tuple(mask) for mask in whole),
        is_masked=has_masks and any(not all(mask) for mask in whole),
        last_turns=tuple(number for number, last in enumerate(is_last) if last),
        messages=_messages(outputs[-1]),
        infos=plain({"num_turns": len(turns), **infos}),
        outputs=tuple(
            plain({**columns, "messages": [*_messages(o)], "rollout_infos": _infos(o)}) for o in outputs
        ),
        total_reward=_total(infos),
        notes=tuple(dict.fromkeys(notes)),
    )


def _messages(output: Any) -> tuple[dict[str, Any], ...]:
    messages = output.messages
    if messages is None:
        message = output.response.choices[0].message
        return ({"role": "assistant", "content": message.content},)
    return tuple(dict(m) if isinstance(m, Mapping) else {"role": "user", "content": str(m)} for m in messages)


def _infos(output: Any) -> dict[str, Any]:
    return {n: v for n, v in dict(output.rollout_infos or {}).items() if n not in _MEDIA}


def _total(infos: Mapping[str, Any]) -> float | None:
    if "total_reward" not in infos:
        return None
    number = number_of(infos["total_reward"])
    if number is None or not math.isfinite(number):
        raise WrongOutput(
            tr("gave {value!r} as total_reward, which is no finite number", value=infos["total_reward"])
        )
    return number


class _Reading:
    """Reads one output: `number` counts them."""

    def __init__(self, number: int, output: Any, turns: Sequence[SampledTurn]) -> None:
        self._number, self._output, self._turns = number, output, turns
        self.notes: list[str] = []
        self._found: list[int] = []

    def last_turn(self) -> int | None:
        """Return which turn the output ends with."""
        ids = [turn.id for turn in self._turns]
        own = str(getattr(self._output.response, "id", ""))
        return ids.index(own) if own in ids else max(self._found, default=None)

    def masks(self, ids: Sequence[list[int]]) -> dict[int, list[bool]]:
        """Return for each sampled turn whose tokens the output has which of them are trained."""
        masks = [list(one) for one in self._output.response_loss_mask or ()] or [
            [1] * len(own) for own in ids
        ]
        if len(masks) != len(ids):
            raise WrongOutput(
                tr(
                    "output {number}: response_loss_mask has {masks} lists, response_token_ids {ids}",
                    number=self._number,
                    masks=len(masks),
                    ids=len(ids),
                )
            )
        made: dict[int, list[bool]] = {}
        for place, (own, mask) in enumerate(zip(ids, masks, strict=True)):
            if len(mask) != len(own):
                raise WrongOutput(
                    tr(
                        "output {number}, turn {place}: response_loss_mask has {mask} entries for {tokens} "
                        "tokens",
                        number=self._number,
                        place=place,
                        mask=len(mask),
                        tokens=len(own),
                    )
                )
            self._read_turn(own, mask, made)
        self._check_logprobs(made)
        return made

    def _read_turn(self, own: list[int], mask: list[int], made: dict[int, list[bool]]) -> None:
        """Find the sampled turns in a list of tokens, in their order: whole ones, and in front of each and at
        the end one that was cut. Other tokens stand between them."""
        place, first = 0, max(self._found, default=-1) + 1
        is_sampled = [False] * len(own)

        def take(number: int, start: int, length: int) -> None:
            ids = self._turns[number].token_ids
            taken = [bool(one) for one in mask[start : start + length]]
            made[number] = taken + [False] * (len(ids) - length)
            is_sampled[start : start + length] = [True] * length
            self._found.append(number)

        while (whole := self._whole(own, place, first)) is not None:
            number, start = whole
            self._take_cut(own[place:start], place, range(first, number), take)
            length = len(self._turns[number].token_ids)
            take(number, start, length)
            place, first = start + length, number + 1
        self._take_cut(own[place:], place, range(first, len(self._turns)), take)
        if any(trains and not known for trains, known in zip(mask, is_sampled, strict=True)):
            self.notes.append(
                tr("response_loss_mask is 1 for tokens that the model has not sampled: they are not trained")
            )

    def _whole(self, own: list[int], place: int, first: int) -> tuple[int, int] | None:
        """Return the next turn all of whose tokens are there, and where they begin."""
        for number in range(first, len(self._turns)):
            start = _find(own, self._turns[number].token_ids, place)
            if start is not None:
                return number, start
        return None

    def _take_cut(
        self, tokens: list[int], place: int, numbers: range, take: Callable[[int, int, int], None]
    ) -> None:
        """Take the turn that has most of its first tokens at the beginning of `tokens`, if any has."""
        lengths = {number: _num_common(tokens, self._turns[number].token_ids) for number in numbers}
        number = max(lengths, key=lengths.__getitem__, default=None)
        if number is not None and lengths[number]:
            take(number, place, lengths[number])

    def _check_logprobs(self, made: Mapping[int, list[bool]]) -> None:
        given = [value for own in self._output.rollout_logprobs or () for value in own]
        pairs = [
            pair
            for number in sorted(made)
            for pair in zip(self._turns[number].logprobs, made[number], strict=True)
        ]
        # Those of all tokens are as good: the trained ones are among them.
        own = ([value for value, _ in pairs], [value for value, is_trained in pairs if is_trained])
        if given and not any(_are_close(given, values) for values in own):
            self.notes.append(
                tr("rollout_logprobs are not those of the sampled tokens: those of the engine are used")
            )


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(abs(a - b) <= _ROUNDING for a, b in pairs)


def _find(own: list[int], sampled: list[int], start: int) -> int | None:
    size = len(sampled)
    places = (n for n in range(start, len(own) - size + 1) if own[n : n + size] == sampled)
    return next(places, None) if size else None


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
