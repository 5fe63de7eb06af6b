"""Episodes of several turns on one rank: the engine decodes some while tools and environments work on others.

Nothing here is collective. What tools and environments give comes back through a queue, from any thread, and
is taken between two steps of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.environments.agents import Agents, spoken_turn
from covey.environments.draft import EpisodeDraft
from covey.environments.images import answer_of, with_media, without_images
from covey.environments.protocol import Lost, Opened, Stepped
from covey.environments.rendering import Conversation, Rendering, Spoken
from covey.errors import EngineLost
from covey.media.errors import MediaError
from covey.rollout.engine import Engine, nothing
from covey.rollout.running import (
    EndReward,
    Running,
    added_to,
    ended_episode,
    group_seed,
    lost_episode,
    no_room,
    refused,
    row_of,
    told,
)
from covey.rollout.slots import Slot
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
# Calls of one turn that are answered; the text of a turn may hold thousands.
_MOST_CALLS = 64


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
            except MediaError as error:
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
        prompt, given = one.slot.prompt, one.slot.prompt.rendered_with
        own = tuple(given.get("tools", ()))
        known = {tool["function"]["name"] for tool in own}
        further = tuple(tool for tool in opened.tools if tool["function"]["name"] not in known)
        one.of_environment = frozenset(tool["function"]["name"] for tool in opened.tools)
        one.schemas = (*own, *further)
        messages = prompt.messages or ()
        if prompt.opened and messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        conversation = Conversation(
            items=tuple(messages),
            num_trusted=len(messages),
            tools=one.schemas,
            arguments=given.get("arguments", {}),
            media=prompt.media,
        )
        first: Rendering | None = Rendering(
            text=prompt.text, token_ids=tuple(prompt.token_ids), opened=prompt.opened, media=prompt.media
        )
        if opened.messages is not None:
            items, media = with_media(opened.messages, self._codec)
            conversation, first = replace(conversation, items=items, num_trusted=0, media=media), None
        if opened.added:
            (said,), media = with_media([{"content": opened.added}], self._codec)
            grown = added_to(conversation.items, said["content"], self._agents.renderer.hide)
            conversation = replace(conversation, items=grown, media=(*conversation.media, *media))
            first = None
        if further:
            first = None
        one.draft = EpisodeDraft(self._agents.renderer, conversation, first)
        if first is None:
            one.begun = self._codec.written_out(one.draft.prompt_ids), self._shown(conversation)
        self._ask(number)

    def _shown(self, conversation: Conversation) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of a prompt as they were written."""
        shown = self._agents.renderer.shown
        return tuple(
            {**item, "content": shown(item["content"])} if isinstance(item.get("content"), str) else item
            for item in conversation.items
            if not isinstance(item, Spoken)
        )

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
        episode, turn = one.slot.episode_id, len(one.turns)
        request = GenerationRequest(
            turn=episode.turn_id(turn),
            prompt_token_ids=prompt_ids,
            sampling=replace(one.slot.plan.sampling, max_new_tokens=room),
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
        return min([room, *(context - length for context in self._contexts())])

    def _contexts(self) -> list[int]:
        """Return how many tokens model and engine can hold, as far as they say so."""
        said = (self._agents.limits.context, self._engine.capabilities.context)
        return [context for context in said if context is not None]

    def _take_turn(self, number: int, completion: Completion) -> None:
        one, agents = self._running[number], self._agents
        draft = one.draft
        assert draft is not None
        before = draft.prompt_ids
        spoken = spoken_turn(completion, before, draft.opened, self._codec, agents)
        if one.slot.plan.split != "train" and completion.kept is not None:
            # Nothing is trained on it.
            completion = replace(completion, kept=None)
        text = self._codec.decode_behind(before if draft.opened else (), completion.token_ids.tolist())
        draft.say(completion, spoken)
        one.turns.append(
            Turn(
                text=text,
                opened=spoken.opened,
                content=spoken.content,
                calls=spoken.calls,
                number=one.asked,
                digest=digest_of(completion.token_ids),
            )
        )
        one.spoken, one.since = spoken, time.perf_counter()
        one.sampled_s += completion.seconds
        one.num_sampled += len(completion.token_ids)
        if completion.finish is not Finish.STOP:
            self._finish(number, Outcome(completion.finish))
        elif agents.environment is not None and agents.environment.has_step:
            agents.environment.step(one.key, told(one, spoken, completion), self._await(number))
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
        """Start the calls of a turn side by side."""
        one = self._running[number]
        one.results, one.missing = {}, len(calls)
        one.num_tool_rounds += 1
        names = [schema["function"]["name"] for schema in one.schemas]
        for index, call in enumerate(calls):
            done = self._await(number, index)
            if index >= _MOST_CALLS:
                done(refused(replace(call, fault=f"a turn may make {_MOST_CALLS} calls"), names))
            elif call.fault or call.name not in names:
                done(refused(call, names))
            elif call.name in one.of_environment and self._agents.environment is not None:
                self._agents.environment.call(one.key, call, done)
            elif self._agents.tools is not None:
                self._agents.tools.call(call, done)
            else:
                done(refused(call, ()))

    def _answer_calls(self, number: int) -> None:
        one = self._running[number]
        given = [one.results[index] for index in sorted(one.results)]
        results = tuple(replace(result, content=self._cut(result.content)) for result in given)
        shown = tuple(replace(result, content=without_images(result), images=()) for result in results)
        one.turns[-1] = replace(one.turns[-1], results=shown)
        self._answer(number, [*map(answer_of, results)], Source.TOOL)

    def _cut(self, text: str) -> str:
        """Return a result within its budget of tokens."""
        most = self._agents.limits.max_result_tokens
        if most is None:
            return text
        (ids,) = self._codec.encode([text])
        if len(ids) <= most:
            return text
        return f"{self._codec.written_out(ids[:most])}\n[cut after {most} of {len(ids)} tokens]"

    # -- answers

    def _take_step(self, number: int, step: Stepped) -> None:
        one, limits = self._running[number], self._agents.limits
        one.turns[-1] = replace(one.turns[-1], reward=step.reward)
        if step.is_done:
            one.turns[-1] = replace(one.turns[-1], answer=tuple(step.messages))
            self._finish(number, Outcome.SCORED)
        elif limits.max_turns is not None and len(one.turns) >= limits.max_turns:
            self._finish(number, Outcome.POLICY_FAILURE)
        else:
            self._answer(number, step.messages, Source.ENVIRONMENT)

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
        self._ended.append((number, ended_episode(one, keeps_environment=keeps)))

    def _lose(self, number: int, words: str) -> None:
        one = self._running.pop(number)
        self._asked = {request: other for request, other in self._asked.items() if other != number}
        if self._agents.environment is not None:
            self._agents.environment.release([one.key])
        self._ended.append((number, lost_episode(one.slot, words)))
