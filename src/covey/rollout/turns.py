"""Episodes of several turns on one rank: the engine decodes some while tools and environments work on others.

Nothing here is collective. What tools and environments give comes back through a queue, from any thread, and
is taken between two steps of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from covey.activity import Activity
from covey.data.errors import TemplateError
from covey.data.text import TextCodec
from covey.environments.agents import Agents, spoken_turn
from covey.environments.histories import SaidText, following
from covey.environments.images import answer_of, with_media, without_images
from covey.environments.protocol import Lost, Opened, Stepped
from covey.errors import EngineLost
from covey.media.errors import MediaError
from covey.rollout.engine import Engine, nothing
from covey.rollout.opening import open_draft
from covey.rollout.running import (
    EndReward,
    Running,
    ended_episode,
    group_seed,
    lost_episode,
    no_room,
    row_of,
    told,
)
from covey.rollout.scheduled import (
    as_gone_on,
    no_turn,
    rewritten_note,
    told_scheduler,
    trained_as_asked,
    with_ended,
)
from covey.rollout.slots import Slot
from covey.rollout.tool_calls import results_of, start_calls
from covey.texts import tr
from covey.types import (
    Completion,
    Episode,
    Finish,
    GenerationRequest,
    Outcome,
    Source,
    ToolCall,
    ToolResult,
    Turn,
)
from covey.types.episode import digest_of

_LOOK_S = 0.2


class TurnLoop:
    """Samples the episodes of `slots`, and of those that `between` adds, which is called between two steps;
    `episodes` gives each, with its number, as it ends."""

    def __init__(
        self,
        slots: Sequence[Slot],
        engine: Engine,
        codec: TextCodec,
        agents: Agents,
        activity: Activity,
        between: Callable[[], None] = nothing,
    ) -> None:
        self._given, self._engine, self._codec = slots, engine, codec
        self._agents, self._activity, self._between = agents, activity, between
        self._num_begun = 0
        self._events: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()
        # Events that are still to come, and requests that the engine has.
        self._num_awaited = 0
        self._asked: dict[int, int] = {}
        self._running: dict[int, Running] = {}
        self._ended: list[tuple[int, Episode]] = []

    def episodes(self) -> Iterator[tuple[int, Episode]]:
        """Run until every episode has ended. Where nothing is left that could sample, those that have not
        ended are infrastructure failures."""
        given, self._given = self._given, ()
        self.add(given)
        self._engine.on_turn = self._between_steps
        try:
            # A rank without episodes steps with those that are one engine with it.
            for completion in self._engine.results():
                self._activity.advance()
                self._take_turn(self._asked.pop(completion.request_id), completion)
                yield from self._taken()
            yield from self._taken()
        except EngineLost as error:
            for number in list(self._running):
                self._lose(number, error.finding.seen)
            yield from self._taken()
        finally:
            self._engine.on_turn = nothing
            if self._agents.environment is not None and self._running:
                self._agents.environment.release([one.key for one in self._running.values()])

    def add(self, slots: Sequence[Slot]) -> range:
        """Begin the episodes of these slots beside those that run; returns their numbers."""
        numbers = range(self._num_begun, self._num_begun + len(slots))
        self._num_begun = numbers.stop
        for number, slot in zip(numbers, slots, strict=True):
            self._running[number] = Running(slot, next(self._agents.keys))
            self._open(number)
        return numbers

    def _taken(self) -> list[tuple[int, Episode]]:
        ended, self._ended = self._ended, []
        return ended

    # -- what comes back

    def _between_steps(self) -> None:
        """Take what has come back; where the engine has nothing to do, wait for more."""
        self._between()
        while self._num_awaited and self._running:
            try:
                event = self._events.get(block=not self._asked, timeout=_LOOK_S)
            except Empty:
                if self._asked or self._activity.has_to_stop:
                    return
                self._between()
                continue
            self._num_awaited -= 1
            self._activity.advance()
            try:
                self._take(*event)
            except (MediaError, TemplateError) as error:
                self._lose(event[0], str(error))

    def _await(self, number: int, index: int = 0) -> Any:
        """Return what is to be called with an event of an episode."""
        self._num_awaited += 1

        def put(value: Any) -> None:
            self._events.put((number, index, value))

        return put

    def _take(self, number: int, index: int, value: Any) -> None:
        one = self._running.get(number)
        if one is None:
            return
        match value:
            case Lost():
                self._lose(number, value.words)
            case Opened():
                self._begin(number, value)
            case ToolResult():
                one.results[index] = value
                one.missing -= 1
                if not one.missing:
                    self._answer_calls(number)
            case Stepped():
                self._take_step(number, value)
            case EndReward(value=Lost() as lost):
                self._lose(number, lost.words)
            case EndReward(value=reward):
                one.reward = reward
                self._end(number)

    # -- beginning

    def _open(self, number: int) -> None:
        one, environment = self._running[number], self._agents.environment
        if environment is None:
            self._begin(number, Opened())
            return
        row = row_of(one.slot.prompt)
        environment.open(one.key, row, group_seed(one.slot.episode_id), self._await(number))

    def _begin(self, number: int, opened: Opened) -> None:
        one = self._running[number]
        open_draft(one, opened, self._codec, self._agents)
        one.max_tokens, one.stop = opened.max_tokens, opened.stop
        self._ask(number)

    # -- turns of the model

    def _ask(self, number: int) -> None:
        """Ask the engine for the next turn. A prompt that leaves no room for one is no episode."""
        one = self._running[number]
        assert one.draft is not None
        prompt_ids = one.draft.prompt_ids
        room = self._room(one, len(prompt_ids))
        if room < 1:
            # Behind later turns there is room, or they are not answered.
            self._lose(number, no_room(len(prompt_ids), self._contexts()))
            return
        episode, turn, sampling = one.slot.episode_id, len(one.turns), one.slot.plan.sampling
        stop = sampling.stop_strings if one.stop is None else one.stop
        request = GenerationRequest(
            turn=episode.turn_id(turn),
            prompt_token_ids=prompt_ids,
            sampling=replace(sampling, max_new_tokens=room, stop_strings=stop),
            extends=episode.turn_id(turn - 1) if one.draft.is_extended else None,
            may_go_on=True,
            media=one.draft.media,
        )
        one.asked = request.turn.turn
        self._asked[self._engine.submit(request)] = number

    def _room(self, one: Running, length: int) -> int:
        """Return the most tokens of the next turn, which `length` tokens stand in front of."""
        limits, draft = self._agents.limits, one.draft
        assert draft is not None
        room = limits.max_tokens
        if not limits.is_per_turn:
            room -= max(length - draft.prompt_length, one.num_sampled)
        own = () if one.max_tokens is None else (one.max_tokens,)
        return min([room, *own, *(context - length for context in self._contexts())])

    def _contexts(self) -> list[int]:
        """Return how many tokens model and engine can hold, as far as they say so."""
        said = (self._agents.limits.context, self._engine.capabilities.context)
        return [context for context in said if context is not None]

    def _take_turn(self, number: int, completion: Completion) -> None:
        one, agents = self._running[number], self._agents
        draft = one.draft
        assert draft is not None
        before, opened = draft.prompt_ids, draft.opened_by_template
        front = before if draft.is_begun else ()
        spoken = spoken_turn(completion, front, draft.opened, self._codec, agents)
        if one.slot.plan.split != "train" and completion.kept is not None:
            # Nothing is trained on it.
            completion = replace(completion, kept=None)
        text = self._codec.decode_behind(front, completion.token_ids.tolist())
        one.said = SaidText(opened=opened, sampled=text, front=front)
        draft.say(completion, spoken)
        one.turns.append(
            Turn(
                text=text,
                opened=agents.renderer.shown(spoken.opened),
                content=agents.renderer.shown(spoken.content),
                calls=spoken.calls,
                number=one.asked,
                digest=digest_of(completion.token_ids),
                is_truncated=completion.finish is Finish.LENGTH,
            )
        )
        one.spoken, one.since = spoken, time.perf_counter()
        one.sampled_s += completion.seconds
        one.num_sampled += len(completion.token_ids)
        environment = agents.environment
        is_over = completion.finish is Finish.ABORT
        if environment is not None and environment.keeps_history and not is_over:
            one.outcome = Outcome(completion.finish)
            environment.step(one.key, told_scheduler(one, completion, len(before)), self._await(number))
        elif completion.finish is not Finish.STOP:
            self._finish(number, Outcome(completion.finish))
        elif environment is not None and environment.has_step:
            environment.step(one.key, told(one, spoken, completion), self._await(number))
        elif not spoken.calls:
            self._finish(number, Outcome.SCORED)
        elif self._may_not_call(one):
            self._finish(number, Outcome.POLICY_FAILURE)
        else:
            self._call(number, spoken.calls)

    def _may_not_call(self, one: Running) -> bool:
        limits = self._agents.limits
        rounds, turns = limits.max_tool_rounds, limits.max_turns
        return (rounds is not None and one.num_tool_rounds >= rounds) or (
            turns is not None and len(one.turns) >= turns
        )

    # -- tools

    def _call(self, number: int, calls: Sequence[ToolCall]) -> None:
        start_calls(self._running[number], calls, self._agents, partial(self._await, number))

    def _answer_calls(self, number: int) -> None:
        one = self._running[number]
        results = results_of(one, self._codec, self._agents.limits.max_result_tokens)
        shown = tuple(replace(result, content=without_images(result), images=()) for result in results)
        one.turns[-1] = replace(one.turns[-1], results=shown)
        self._answer(number, [*map(answer_of, results)], Source.TOOL)

    # -- answers

    def _take_step(self, number: int, step: Stepped) -> None:
        one, limits = self._running[number], self._agents.limits
        if step.history is not None or step.ended is not None:
            self._take_history(number, step)
            return
        one.turns[-1] = replace(one.turns[-1], reward=step.reward)
        if step.is_done:
            one.turns[-1] = replace(one.turns[-1], answer=tuple(step.messages))
            self._finish(number, Outcome.SCORED)
        elif limits.max_turns is not None and len(one.turns) >= limits.max_turns:
            self._finish(number, Outcome.POLICY_FAILURE)
        else:
            self._answer(number, step.messages, Source.ENVIRONMENT)

    def _take_history(self, number: int, step: Stepped) -> None:
        """Go on with the conversation of a scheduler, or end with it. One that asks for more than there is
        room for is told once that its turn was cut."""
        one, agents = self._running[number], self._agents
        draft, environment = one.draft, agents.environment
        assert draft is not None and environment is not None
        if step.ended is not None or step.history is None:
            one.ended = step.ended
            for words in () if step.ended is None else step.ended.notes:
                agents.notes.add(words)
            self._finish(number, one.outcome)
            return
        one.turns[-1] = replace(one.turns[-1], seconds=time.perf_counter() - one.since)
        one.max_tokens, one.stop = step.max_tokens, step.stop
        most = agents.limits.max_turns
        has_turn = most is None or len(one.turns) < most
        if has_turn:
            going_on = following(draft, step.history, one.said, self._codec, agents.renderer)
            if self._room(one, going_on.length) >= 1:
                if going_on.rendering.rewritten:
                    agents.notes.add(rewritten_note(going_on.rendering.rewritten))
                one.turns[-1] = as_gone_on(one.turns[-1], going_on, draft.last_ids)
                going_on.apply(draft)
                self._ask(number)
                return
        outcome = Outcome.TRUNCATED if has_turn else Outcome.POLICY_FAILURE
        if one.is_full:
            agents.notes.add(tr("run() asks for more turns than there is room for, and does not end"))
            self._finish(number, outcome)
            return
        one.is_full, one.outcome = True, outcome
        environment.step(one.key, no_turn(), self._await(number))

    def _answer(self, number: int, messages: Sequence[Mapping[str, Any]], source: Source) -> None:
        """Go on with what follows a turn."""
        one = self._running[number]
        assert one.draft is not None
        answer, media = with_media(messages, self._codec)
        one.turns[-1] = replace(one.turns[-1], answer=answer, seconds=time.perf_counter() - one.since)
        rendering = one.draft.answered(answer, media)
        if self._room(one, one.draft.length_with(rendering)) < 1:
            self._finish(number, Outcome.TRUNCATED)
            return
        one.draft.answer(answer, rendering, source, media)
        self._ask(number)

    # -- the end

    def _finish(self, number: int, outcome: Outcome) -> None:
        """End the turns of an episode, and ask for its reward where the environment gives one."""
        one, environment = self._running[number], self._agents.environment
        one.outcome = outcome
        if one.ended is not None:
            one.reward = one.ended.total_reward
            self._end(number)
            return
        if environment is not None and environment.has_reward:
            done = self._await(number)
            environment.reward(one.key, lambda value: done(EndReward(value)))
            return
        steps = [turn.reward for turn in one.turns if turn.reward is not None]
        # What is cut before its environment gave a reward has earned none.
        is_cut = environment is not None and outcome is not Outcome.SCORED
        one.reward = sum(steps) if steps or is_cut else None
        self._end(number)

    def _end(self, number: int) -> None:
        one, environment = self._running.pop(number), self._agents.environment
        keeps = environment is not None and self._agents.keeps_environments
        if environment is not None and not keeps:
            environment.release([one.key])
        trained_as_asked(one, trains_last=self._agents.limits.trains_last)
        self._ended.append((number, with_ended(one, ended_episode(one, keeps_environment=keeps))))

    def _lose(self, number: int, words: str) -> None:
        one = self._running.pop(number)
        self._asked = {request: other for request, other in self._asked.items() if other != number}
        if self._agents.environment is not None:
            self._agents.environment.release([one.key])
        self._ended.append((number, lost_episode(one.slot, words)))
