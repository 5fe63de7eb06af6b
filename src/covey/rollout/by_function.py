"""Episodes of one rank that a function of the user makes: `rollout_func`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

from covey.activity import Activity
from covey.codes import CODES
from covey.data.text import TextCodec
from covey.errors import RunFailed
from covey.rollout.engine import Engine
from covey.rollout.function_context import RolloutContext, RolloutFunction, given
from covey.rollout.function_rows import ROUNDING, FunctionRow, UnusableRows, rows_of
from covey.rollout.running import lost_episode
from covey.rollout.slots import Slot
from covey.texts import tr
from covey.types import Completion, Episode, Finding, Finish, Fix, KeptSets, Outcome, Source, TokenSequence
from covey.types.arrays import bools, floats, ints


class FunctionEpisodes:
    """Calls a rollout function once with the prompts of `slots`; `episodes` gives what it makes of each.

    What the function raises is raised. Where nothing is left that could sample, all are infrastructure
    failures.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        engine: Engine,
        codec: TextCodec,
        function: RolloutFunction,
        activity: Activity,
    ) -> None:
        self._slots, self._engine, self._codec = slots, engine, codec
        self._function, self._activity = function, activity

    def episodes(self) -> Iterator[tuple[int, Episode]]:
        """Give each episode with its number. Raises RunFailed (F145) for what cannot be trained."""
        if not self._slots:
            return
        slots, started = self._slots, time.perf_counter()
        context = RolloutContext(self._function, slots, self._engine, self._codec, self._activity)
        try:
            with context.open():
                output = self._function.call([given(slot.prompt) for slot in slots], context)
        except Exception:
            if context.lost is None:
                raise
        if context.lost is not None:
            for number, slot in enumerate(slots):
                yield number, lost_episode(slot, context.lost.finding.seen)
            return
        seconds = time.perf_counter() - started
        try:
            rows = rows_of(
                output,
                len(slots),
                context.num_generations,
                vocab=self._function.policy.vocab,
                context=self._function.model_context,
            )
            made = [self._episode(*pair, context, seconds) for pair in enumerate(rows)]
        except UnusableRows as error:
            raise self._failure(error) from None
        yield from enumerate(made)

    def _episode(self, number: int, row: FunctionRow, context: RolloutContext, seconds: float) -> Episode:
        slot = self._slots[number]
        prompt, sampling = slot.prompt, slot.plan.sampling
        drawn = context.drawn(row)
        _check_logprobs(number, row, drawn)
        kept = None
        if sampling.has_filters and slot.plan.split == "train":
            kept = _kept(number, drawn)
        is_own = row.prompt_ids == tuple(prompt.token_ids)
        text = "" if is_own else self._codec.written_out(row.prompt_ids)
        # What the prompt has opened and the completion are one text to a reader.
        before = row.prompt_ids if prompt.opened and (is_own or text.endswith(prompt.opened)) else ()
        runs = [(is_model, len(list(run))) for is_model, run in groupby(row.is_trained)]
        return Episode(
            id=slot.episode_id,
            sequences=(
                TokenSequence(
                    token_ids=ints((*row.prompt_ids, *row.completion_ids)),
                    is_trained=bools((*[False] * len(row.prompt_ids), *row.is_trained)),
                    logprobs=floats(row.logprobs),
                    versions=((self._activity.step, len(row.logprobs)),),
                    sources=(
                        (Source.PROMPT, len(row.prompt_ids)),
                        *((Source.MODEL if own else Source.ENVIRONMENT, count) for own, count in runs),
                    ),
                    kept=kept,
                ),
            ),
            outcome=_outcome(row, drawn, sampling.stop_token_ids),
            text=self._codec.decode_behind(before, row.completion_ids),
            sampling=sampling,
            seconds=seconds,
            prompt_text=text,
            columns=row.columns,
        )

    def _failure(self, error: UnusableRows) -> RunFailed:
        step = self._activity.step
        return RunFailed(
            Finding(
                code="F145",
                seen=tr("what rollout_func returned cannot be trained: {error}", error=error),
                why=CODES["F145"].why,
                cause="",
                fixes=(Fix(text=tr("mend the function; docs/tools.md shows what it returns")),),
                step=step,
            )
        )


def _outcome(row: FunctionRow, drawn: Sequence[Completion] | None, ends: Sequence[int]) -> Outcome:
    """Return whether the last turn of the model ended by itself: with an end token, or where `generate` says
    so."""
    last = max(n for n, is_trained in enumerate(row.is_trained) if is_trained)
    is_ended = row.completion_ids[last] in ends or bool(drawn and drawn[-1].finish is Finish.STOP)
    return Outcome.SCORED if is_ended else Outcome.TRUNCATED


def _check_logprobs(number: int, row: FunctionRow, drawn: Sequence[Completion] | None) -> None:
    """Raise UnusableRows where tokens that `generate` sampled have other log-probabilities than it gave."""
    values = [value for completion in drawn or () for value in completion.logprobs.tolist()]
    for place, (own, value) in enumerate(zip(row.logprobs, values, strict=False)):
        if abs(own - value) > ROUNDING:
            raise UnusableRows(
                tr(
                    "row {number}: the log-probability of token {place} of the model is {own:.4g}, but "
                    "generate() gave {value:.4g}",
                    number=number,
                    place=place,
                    own=own,
                    value=value,
                )
            )


def _kept(number: int, drawn: Sequence[Completion] | None) -> KeptSets:
    """Return the sets that the tokens of a row were drawn from."""
    sets = [completion.kept for completion in drawn or () if completion.kept is not None]
    if drawn is None or len(sets) < len(drawn):
        raise UnusableRows(
            tr(
                "row {number}: top_p, top_k or min_p leave out tokens, and which they are is known only of "
                "whole completions of generate() behind the very tokens that they were sampled behind",
                number=number,
            )
        )
    return KeptSets.joined(sets)
