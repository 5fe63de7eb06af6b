"""An episode of several turns while it is sampled: its tokens, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.rendering import Conversation, Renderer, Rendering, Spoken
from covey.types import Completion, KeptSets, Medium, Source, TokenSequence
from covey.types.arrays import (
    Bools,
    Ints,
    bools,
    constant_bools,
    ints,
    joined_bools,
    joined_floats,
    joined_ints,
    joined_runs,
    selected_runs,
)


@dataclass(slots=True)
class SaidTurn:
    """Holds a turn of the model within its sequence, and which of its tokens are trained."""

    place: int
    completion: Completion
    mask: Bools


@dataclass(slots=True)
class SequenceDraft:
    """A sequence while it grows. `segments` are the texts in front of each of its turns."""

    segments: list[str]
    ids: list[Ints] = field(default_factory=list)
    sources: list[tuple[Source, int]] = field(default_factory=list)
    said: list[SaidTurn] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)

    def add(self, token_ids: Sequence[int] | Ints, source: Source) -> None:
        """Add tokens."""
        self.ids.append(ints(token_ids))
        self.sources.append((source, len(token_ids)))

    def say(self, completion: Completion) -> SaidTurn:
        """Add a turn of the model, which is trained."""
        said = SaidTurn(len(self.ids), completion, constant_bools(True, len(completion.token_ids)))
        self.add(completion.token_ids, Source.MODEL)
        self.said.append(said)
        return said

    def cut(self, length: int) -> None:
        """Leave out the tokens of the last turn from `length` on."""
        said = self.said[-1]
        whole = said.completion
        mask = bools(n < length for n in range(len(whole.token_ids)))
        said.completion = replace(
            whole,
            token_ids=whole.token_ids[:length],
            logprobs=whole.logprobs[:length],
            versions=selected_runs(whole.versions, mask),
            kept=None if whole.kept is None else whole.kept.part(0, length),
        )
        said.mask = said.mask[:length]
        self.ids[said.place] = said.completion.token_ids
        self.sources[said.place] = (Source.MODEL, length)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens so far."""
        return tuple(joined_ints(self.ids).tolist())

    @property
    def length(self) -> int:
        """Return how many tokens there are."""
        return sum(count for _, count in self.sources)

    def sequence(self) -> TokenSequence:
        """Return the sequence as it is now."""
        masks = [constant_bools(False, count) for _, count in self.sources]
        for said in self.said:
            masks[said.place] = said.mask
        kept = [s.completion.kept.selected(s.mask) for s in self.said if s.completion.kept is not None]
        return TokenSequence(
            token_ids=joined_ints(self.ids),
            is_trained=joined_bools(masks),
            logprobs=joined_floats([s.completion.logprobs[s.mask] for s in self.said]),
            versions=joined_runs(selected_runs(s.completion.versions, s.mask) for s in self.said),
            sources=tuple(self.sources),
            kept=KeptSets.joined(kept) if kept else None,
            media=tuple(self.media),
        )


class EpisodeDraft:
    """Grows by turns of the model (`say`) and by what is answered (`answer`).

    `rewritten` are the reasons, in words, why sequences after the first one began.
    """

    def __init__(
        self, renderer: Renderer, conversation: Conversation, first: Rendering | None = None
    ) -> None:
        self._renderer, self.conversation = renderer, conversation
        self._next = renderer.start(conversation) if first is None else first
        self._sequences: list[SequenceDraft] = []
        self._said: list[SaidTurn] = []
        # Where somebody else has begun the next turn: the marks that the model has sampled of it.
        self._begun: frozenset[str] | None = None
        self.rewritten: list[str] = []
        if first is None:
            self._take_begun()
        self._begin()

    @property
    def opened(self) -> str:
        """Return what the template has opened of the next turn."""
        return self._next.opened

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return all that stands in front of the next turn."""
        return self._sequences[-1].token_ids

    @property
    def media(self) -> tuple[Medium, ...]:
        """Return the images of all that stands in front of the next turn."""
        return tuple(self._sequences[-1].media)

    @property
    def prompt_length(self) -> int:
        """Return the tokens of the prompt that the episode began with."""
        return self._sequences[0].sources[0][1]

    @property
    def is_extended(self) -> bool:
        """Return whether the next turn goes on from the tokens of the former one."""
        return bool(self._sequences[-1].said)

    @property
    def is_begun(self) -> bool:
        """Return whether the next turn goes on with a text of its own: of the template, or of a scheduler."""
        return self._begun is not None or bool(self.opened)

    @property
    def opened_by_template(self) -> str:
        """Return what the template, and nobody else, has opened of the next turn."""
        return self.opened if self._begun is None else ""

    def say(self, completion: Completion, spoken: Spoken) -> None:
        """Add a turn of the model."""
        self._said.append(self._sequences[-1].say(completion))
        if self._begun:
            spoken = replace(spoken, marks=spoken.marks | self._begun)
        self._begun = None
        self._grow(spoken)

    @property
    def last_ids(self) -> list[int]:
        """Return the tokens of the last turn."""
        ids: list[int] = self._said[-1].completion.token_ids.tolist()
        return ids

    def go_on(self, length: int, begun: str, token_ids: Sequence[int]) -> None:
        """Go on with the last turn: its first `length` tokens stay, `token_ids` follow, which are not
        trained, and what the model wrote of it has become the text `begun`."""
        *items, former = self.conversation.items
        assert isinstance(former, Spoken)
        last = self._sequences[-1]
        last.cut(length)
        # Also where it adds nothing: the turns of the model stay apart.
        last.add(token_ids, Source.ENVIRONMENT)
        last.segments[-1] += begun
        self.conversation = replace(self.conversation, items=tuple(items))
        self._next, self._begun = Rendering(text="", token_ids=(), opened=former.opened + begun), former.marks

    def restart(self, conversation: Conversation, why: str) -> Rendering:
        """Return the beginning of a new sequence with another conversation; nothing is added."""
        return self._renderer.start(conversation, why)

    def begin_again(self, conversation: Conversation, rendering: Rendering) -> None:
        """Begin a new sequence with another conversation, which may end with the beginning of a turn."""
        self.conversation, self._next, self._begun = conversation, rendering, None
        self._take_begun()
        self.rewritten.append(rendering.rewritten)
        self._begin()

    def turn_lengths(self) -> list[int]:
        """Return for each turn of the model how many tokens it has."""
        return [len(said.mask) for said in self._said]

    def leave_out(self, masks: Sequence[Sequence[bool]]) -> None:
        """Train no more the tokens of each turn of which its mask is False."""
        for said, mask in zip(self._said, masks, strict=True):
            said.mask = said.mask & bools(mask)

    def answered(self, messages: Sequence[Mapping[str, Any]], media: Sequence[Medium] = ()) -> Rendering:
        """Return what would stand in front of the next turn behind these messages, which have the images
        `media`; nothing is added."""
        former = self.conversation
        conversation = replace(former, items=(*former.items, *messages), media=(*former.media, *media))
        return self._renderer.follow(conversation, self._sequences[-1].segments)

    def length_with(self, rendering: Rendering) -> int:
        """Return the tokens in front of the next turn with this answer."""
        before = 0 if rendering.rewritten else self._sequences[-1].length
        return before + len(rendering.token_ids)

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering,
        source: Source,
        media: Sequence[Medium] = (),
    ) -> None:
        """Add messages with their images, and the tokens that were rendered for them."""
        self._grow(*messages)
        self.conversation = replace(self.conversation, media=(*self.conversation.media, *media))
        self._next = rendering
        if rendering.rewritten:
            self.rewritten.append(rendering.rewritten)
            self._begin()
            return
        self._sequences[-1].segments.append(rendering.text)
        self._sequences[-1].add(rendering.token_ids, source)
        self._sequences[-1].media += rendering.media

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the sequences of the episode, each up to its last turn."""
        return tuple(draft.sequence() for draft in self._sequences)

    def _grow(self, *items: Mapping[str, Any] | Spoken) -> None:
        self.conversation = replace(self.conversation, items=(*self.conversation.items, *items))

    def _take_begun(self) -> None:
        """Make the last message, where it is the assistant's, the beginning of the next turn."""
        begun = self._renderer.begun(self.conversation)
        if begun is None:
            return
        *items, last = self.conversation.items
        self.conversation = replace(self.conversation, items=tuple(items))
        self._next = replace(self._next, opened=begun)
        self._begun = last.marks if isinstance(last, Spoken) else frozenset()

    def _begin(self) -> None:
        self._sequences.append(SequenceDraft(segments=[self._next.text]))
        self._sequences[-1].add(self._next.token_ids, Source.PROMPT)
        self._sequences[-1].media += self._next.media
