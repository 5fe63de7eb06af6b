"""A reward function, sync or async, called once: its values and notes, or the words of what it raised."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from covey.rewards.images import NAMES, opened
from covey.rewards.protocol import TrainerState
from covey.texts import counted, packed, tr, unpacked
from covey.types import RewardCause, Status

# `{"rows": [[value, status, message, cause], …], "extras": {column: […]}, "metrics": {name: […]}}`, or
# `{"raised": words}` for a call that raised, or `{"failed": words, "status": "timeout", "cause": ""}` for one
# with no end.
Reply = dict[str, Any]
_TRAJECTORIES = "trajectory_inputs"
_OWN_FILES = (str(Path(__file__).parents[1]), importlib.__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """The arguments a function names, those of them it cannot do without, and whether it takes any other."""

    names: tuple[str, ...]
    demands: tuple[str, ...]
    takes_all: bool

    def includes(self, name: str) -> bool:
        """Whether the function is given this argument."""
        return self.takes_all or name in self.names


@dataclass(frozen=True, slots=True)
class RowFault:
    """What a reward of covey's own gives in place of a number where one row failed."""

    words: str
    cause: RewardCause = ""


class Callee:
    """A callable and how it is called: keyword arguments, of which it gets what it names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._file = file_of(function)
        self._loop: tuple[ThreadPoolExecutor, asyncio.Runner] | None = None
        # Waits for a coroutine on a loop that is there already.
        self.wait: Callable[[Awaitable[Any]], Any] | None = None
        self.wants = wants_of(function)
        self.is_async = is_async(function)

    def call(self, arguments: Mapping[str, Any], count: int, state: TrainerState) -> Reply:
        """Call the function on `count` rows."""
        notes = _Notes(count)
        extras = {"trainer_state": state, "log_extra": notes.log_extra, "log_metric": notes.log_metric}
        accepted = {k: v for k, v in {**arguments, **extras}.items() if self.wants.includes(k)}
        try:
            accepted.update({name: opened(accepted[name]) for name in NAMES if name in accepted})
            if _TRAJECTORIES in accepted:
                accepted[_TRAJECTORIES] = _trajectories(accepted[_TRAJECTORIES])
            values = self._finished(self._function(**accepted))
            if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
                values = list(values)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is somebody's code: what it raises is its result
            return {"raised": describe(error, self._file)}
        return {"rows": _rows(values, count), "extras": notes.extras, "metrics": notes.metrics}

    def _finished(self, result: Any) -> Any:
        """What a coroutine returns. One loop, in a thread of its own, serves every call: clients that a
        reward keeps belong to the loop they were made in, and a notebook runs a loop in this thread."""
        if not inspect.isawaitable(result):
            return result
        if self.wait is not None:
            return self.wait(result)
        if self._loop is None:
            self._loop = (ThreadPoolExecutor(1, "reward-loop"), asyncio.Runner())
        thread, runner = self._loop
        return thread.submit(runner.run, _awaited(result)).result()


def _trajectories(values: Sequence[Any]) -> Any:
    """Return what schedulers have made of each trajectory by its id, as ms-swift passes it; a column of the
    data with this name as it is."""
    if not all(isinstance(value, Mapping) and value.keys() == {"request_id", "outputs"} for value in values):
        return values
    return {value["request_id"]: value["outputs"] for value in values}


def packed_reply(reply: Reply) -> Reply:
    """A reply as JSON holds it, with the templates of its texts."""
    return _each_text(reply, packed)


def unpacked_reply(reply: Reply) -> Reply:
    """The reply that `packed_reply` made this of."""
    return _each_text(reply, unpacked)


def _each_text(reply: Reply, change: Callable[[Any], Any]) -> Reply:
    words: Reply = {name: change(reply[name]) for name in ("raised", "failed") if name in reply}
    rows = [[value, status, change(text), cause] for value, status, text, cause in reply.get("rows", ())]
    return {**reply, **words, **({"rows": rows} if "rows" in reply else {})}


def wants_of(function: Callable[..., Any]) -> Wants:
    """The arguments of a function; any arguments where its signature is not known. A positional-only one is a
    TypeError."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return Wants(names=(), demands=(), takes_all=True)
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise TypeError(
                tr(
                    "takes {name} only by position, but rewards are called with keyword arguments",
                    name=p.name,
                )
            )
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Wants(
        names=tuple(p.name for p in named),
        demands=tuple(p.name for p in named if p.default is p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object's `__call__`, is an `async def`."""
    inner = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def describe(error: BaseException, file: str | None) -> str:
    """`KeyError: 'gold' (rewards.py, line 7: return row["gold"])`: the last line of the user's file, else of
    any that is neither covey's nor the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (*_OWN_FILES, "<")
    own = [f for f in frames if f.filename == file] or [
        f for f in frames if not f.filename.startswith(foreign)
    ]
    where = (
        tr(
            " ({name}, line {lineno}: {line})",
            name=Path(own[-1].filename).name,
            lineno=own[-1].lineno,
            line=own[-1].line,
        )
        if own
        else ""
    )
    return tr("{name}: {error!s:.500}{where}", name=type(error).__name__, error=error, where=where)


def plain(value: Any) -> Any:
    """A value as JSON has it; what JSON has no word for is its text."""
    return json.loads(json.dumps(value, default=_listed))


class _Notes:
    """What a function notes during one call."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """One value a row, written beside the completion."""
        values = list(values)
        if len(values) != self._count:
            raise ValueError(
                tr("log_extra({column!r}) {gave}", column=column, gave=_gave(len(values), self._count))
            )
        self.extras[str(column)] = plain(values)

    def log_metric(self, name: str, value: float) -> None:
        """A number of the whole call."""
        self.metrics.setdefault(str(name), []).append(float(value))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _rows(values: Any, count: int) -> list[list[Any]]:
    if not isinstance(values, list):
        words = tr("returned {values!r:.80} instead of a list with one number per completion", values=values)
        return [_failed(Status.ERROR, words, "no_number")] * count
    if len(values) != count:
        return [_failed(Status.ERROR, _gave(len(values), count), "num_values")] * count
    return [_row(value) for value in values]


def _row(value: Any) -> list[Any]:
    if value is None:
        return [None, Status.OK.value, "", ""]
    if isinstance(value, RowFault):
        return _failed(Status.ERROR, value.words, value.cause)
    if isinstance(value, list | tuple) or getattr(value, "ndim", None):
        return _steps(list(value))
    number = number_of(value)
    if number is None:
        words = tr(
            "returned a {name} instead of a number or None: {value!r:.80}",
            name=type(value).__name__,
            value=value,
        )
        return _failed(Status.INVALID, words, "no_number")
    if not math.isfinite(number):
        return _failed(
            Status.INVALID,
            tr("returned {number} instead of a finite number or None", number=number),
            "not_finite",
        )
    return [number, Status.OK.value, "", ""]


def _failed(status: Status, words: str, cause: RewardCause) -> list[Any]:
    return [None, status.value, words, cause]


def _steps(values: Sequence[Any]) -> list[Any]:
    """The numbers of a row's steps; how many there have to be is known where the row is."""
    numbers = [number_of(value) for value in values]
    for i, (value, number) in enumerate(zip(values, numbers, strict=True), start=1):
        if number is None:
            kind = type(value).__name__
            words = tr(
                "returned a {kind} instead of a number for step {i} of {num_values}: {value!r:.80}",
                kind=kind,
                i=i,
                num_values=len(values),
                value=value,
            )
            return _failed(Status.INVALID, words, "no_step_number")
        if not math.isfinite(number):
            words = tr(
                "returned {number} for step {i} of {num_values}", number=number, i=i, num_values=len(values)
            )
            return _failed(Status.INVALID, words, "not_finite")
    return [numbers, Status.OK.value, "", ""]


def number_of(value: Any) -> float | None:
    """A number as a float, also one of numpy or torch; None of anything else, text with digits too."""
    try:
        return float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _gave(values: int, count: int) -> str:
    return tr(
        "returned {values} for {completions}",
        values=counted(values, "value"),
        completions=counted(count, "completion"),
    )


def file_of(function: Any) -> str | None:
    """The file that holds a function or class, or the class of an object."""
    is_named = inspect.isroutine(function) or inspect.isclass(function)
    inner = inspect.unwrap(function) if is_named else type(function)
    try:
        return inspect.getfile(inner)
    except TypeError:
        return None


def _listed(value: Any) -> Any:
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)
