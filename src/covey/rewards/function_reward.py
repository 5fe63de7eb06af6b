"""A reward that is a function, in this process or in workers: calls, and one judgement out of their
replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from covey.rewards.arguments import STANDARD, Unsendable, arguments_of
from covey.rewards.callee import Reply, Wants
from covey.rewards.pool import chunks
from covey.rewards.protocol import Form, Judgement, RowWord, Scored, TrainerState
from covey.rewards.steps import STEP_SEPARATOR
from covey.texts import counted, tr
from covey.types import ScorePart, Status

# Starts a call with these arguments on so many rows; the function that comes back waits for the reply.
Ask = Callable[[Mapping[str, Sequence[Any]], int, TrainerState], Callable[[], Reply]]
# The arguments of a call, where they are not what the function names.
Arguments = Callable[[Sequence[Scored]], Mapping[str, Sequence[Any]]]


class FunctionReward:
    """Cuts rows into calls, at the borders of groups or each on its own (`by_row`), and calls again row by
    row where a call raised.

    With `calls` 0 the function is one of this process, called once, when its judgement is waited for.
    """

    def __init__(
        self,
        name: str,
        wants: Wants,
        ask: Ask,
        *,
        form: Form = "text",
        calls: int = 0,
        by_row: bool = False,
        step_separator: str = STEP_SEPARATOR,
        arguments: Arguments | None = None,
    ) -> None:
        self.name = name
        self.is_here = calls == 0
        self._wants = wants
        self._ask = ask
        self._arguments = arguments or partial(
            arguments_of, form=form, wants=wants, step_separator=step_separator
        )
        self._calls = calls
        self._by_row = by_row
        self._separator = step_separator

    def lacks(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Arguments that the function demands and that neither covey nor these columns give."""
        return tuple(n for n in self._wants.demands if n not in STANDARD and n not in columns)

    def named(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Those of these columns that the function names among its arguments."""
        return tuple(c for c in columns if c in self._wants.names)

    def begin(self, rows: Sequence[Scored], state: TrainerState) -> Callable[[], Judgement]:
        """Start the calls; the function that comes back waits for them."""
        if self._by_row:
            parts = [range(i, i + 1) for i in range(len(rows))]
        else:
            parts = chunks([r.prompt.id for r in rows], max(self._calls, 1))
        begun = [self._begun([rows[i] for i in part], state) for part in parts]
        return lambda: self._gathered(begun, state)

    def _begun(
        self, rows: Sequence[Scored], state: TrainerState
    ) -> tuple[Sequence[Scored], Callable[[], Reply]]:
        try:
            return rows, self._ask(self._arguments(rows), len(rows), state)
        except Unsendable as error:
            reply: Reply = {"failed": str(error), "status": Status.ERROR.value}
            return rows, lambda: reply

    def _gathered(
        self, begun: Sequence[tuple[Sequence[Scored], Callable[[], Reply]]], state: TrainerState
    ) -> Judgement:
        words: list[RowWord] = []
        metrics: dict[str, tuple[float, ...]] = {}
        for rows, reply_of in begun:
            reply = reply_of()
            if "raised" in reply and len(rows) > 1:
                judgement = self._each_alone(rows, state, reply["raised"])
            else:
                judgement = self._judgement(reply, rows)
            words.extend(judgement.rows)
            for name, values in judgement.metrics.items():
                metrics[name] = (*metrics.get(name, ()), *values)
        return Judgement(rows=tuple(words), metrics=metrics)

    def _each_alone(self, rows: Sequence[Scored], state: TrainerState, raised: str) -> Judgement:
        """A call per row, after that with all of them raised; the rows that have a value carry its words."""
        alone = self._gathered([self._begun([row], state) for row in rows], state)
        told = [
            replace(word, part=replace(word.part, message=word.part.message or raised)) for word in alone.rows
        ]
        return replace(alone, rows=tuple(told))

    def _judgement(self, reply: Reply, rows: Sequence[Scored]) -> Judgement:
        if "rows" not in reply:
            status = Status(reply.get("status", Status.ERROR))
            message = str(reply.get("raised", reply.get("failed")))
            part = ScorePart(name=self.name, value=None, status=status, message=message)
            word = RowWord(part=part, extras={}, cause=reply.get("cause", ""))
            return Judgement(rows=(word,) * len(rows), metrics={})
        words = [
            self._word(row, said, {column: values[i] for column, values in reply["extras"].items()})
            for i, (row, said) in enumerate(zip(rows, reply["rows"], strict=True))
        ]
        return Judgement(rows=tuple(words), metrics={n: tuple(v) for n, v in reply["metrics"].items()})

    def _word(self, row: Scored, said: Sequence[Any], extras: Mapping[str, Any]) -> RowWord:
        value, status, message, cause = said
        if not isinstance(value, list):
            part = ScorePart(name=self.name, value=value, status=Status(status), message=message)
            return RowWord(part=part, extras=extras, cause=cause)
        due = len(row.steps(self._separator))
        if len(value) != due:
            message = tr(
                "returned {numbers} for {steps} of a completion (prompt_id {id})",
                numbers=counted(len(value), "number"),
                steps=counted(due, "step"),
                id=row.prompt.id,
            )
            part = ScorePart(name=self.name, value=None, status=Status.ERROR, message=message)
            return RowWord(part=part, extras=extras, cause="num_steps")
        part = ScorePart(name=self.name, value=fmean(value) if value else None, steps=tuple(value))
        return RowWord(part=part, extras=extras)
