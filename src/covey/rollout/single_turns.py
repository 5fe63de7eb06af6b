"""Episodes of one turn on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.errors import EngineLost
from covey.rollout.engine import Engine, nothing
from covey.rollout.running import lost_episode
from covey.rollout.slots import Slot
from covey.types import Completion, Episode, GenerationRequest, Outcome, TokenSequence


class SingleTurns:
    """Samples the episodes of `slots`, and of those that `between` adds, which is called between two steps;
    `episodes` gives each, with its number, as it ends."""

    def __init__(
        self,
        slots: Sequence[Slot],
        engine: Engine,
        codec: TextCodec,
        activity: Activity,
        between: Callable[[], None] = nothing,
    ) -> None:
        self._given, self._engine, self._codec = slots, engine, codec
        self._activity, self._between = activity, between
        self._num_begun = 0
        # By the numbers of their requests.
        self._running: dict[int, tuple[int, Slot]] = {}

    def add(self, slots: Sequence[Slot]) -> range:
        """Begin the episodes of these slots beside those that run; returns their numbers."""
        numbers = range(self._num_begun, self._num_begun + len(slots))
        self._num_begun = numbers.stop
        for number, slot in zip(numbers, slots, strict=True):
            request = GenerationRequest(
                prompt_token_ids=tuple(slot.prompt.token_ids),
                sampling=slot.plan.sampling,
                turn=slot.episode_id.turn_id(),
                media=slot.prompt.media,
            )
            self._running[self._engine.submit(request)] = number, slot
        return numbers

    def episodes(self) -> Iterator[tuple[int, Episode]]:
        """Run until every episode has ended. Where nothing is left that could sample, those that have not
        ended are infrastructure failures."""
        given, self._given = self._given, ()
        self.add(given)
        self._engine.on_turn = self._between
        try:
            # A rank without episodes steps with those that are one engine with it.
            for completion in self._engine.results():
                self._activity.advance()
                number, slot = self._running.pop(completion.request_id)
                yield number, self._episode(slot, completion)
        except EngineLost as error:
            lost, self._running = list(self._running.values()), {}
            for number, slot in lost:
                yield number, lost_episode(slot, error.finding.seen)
        finally:
            self._engine.on_turn = nothing

    def _episode(self, slot: Slot, completion: Completion) -> Episode:
        # A reader sees what the prompt has opened and the completion as one text.
        before = slot.prompt.token_ids if slot.prompt.opened else ()
        if slot.plan.split != "train" and completion.kept is not None:
            # Nothing is trained on it.
            completion = replace(completion, kept=None)
        return Episode(
            id=slot.episode_id,
            sequences=(TokenSequence.of_turn(slot.prompt.token_ids, completion, slot.prompt.media),),
            outcome=Outcome(completion.finish),
            text=self._codec.decode_behind(before, completion.token_ids.tolist()),
            sampling=slot.plan.sampling,
            seconds=completion.seconds,
        )
