"""An episode of several turns while it is sampled: its tokens, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.rendering import Conversation, Renderer, Rendering, Spoken
from covey.types import Completion, KeptSets, Medium, Source, TokenSequence
from covey.types.arrays import (
    Bools,
    Floats,
    Ints,
    Versions,
    constant_bools,
    ints,
    joined_bools,
    joined_floats,
    joined_ints,
    joined_runs,
)


@dataclass(slots=True)
class SequenceDraft:
    """A sequence while it grows. `segments` are the texts in front of each of its turns."""

    segments: list[str]
    ids: list[Ints] = field(default_factory=list)
    is_trained: list[Bools] = field(default_factory=list)
    sources: list[tuple[Source, int]] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    versions: list[Versions] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)

    def add(self, token_ids: Sequence[int] | Ints, source: Source) -> None:
        """Add tokens; those of the model are trained."""
        self.ids.append(ints(token_ids))
        self.is_trained.append(constant_bools(source is Source.MODEL, len(token_ids)))
        self.sources.append((source, len(token_ids)))

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
        return TokenSequence(
            token_ids=joined_ints(self.ids),
            is_trained=joined_bools(self.is_trained),
            logprobs=joined_floats(self.logprobs),
            versions=joined_runs(self.versions),
            sources=tuple(self.sources),
            kept=KeptSets.joined(self.kept) if self.kept else None,
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
        self.rewritten: list[str] = []
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
        return len(self._sequences[-1].segments) > 1

    def say(self, completion: Completion, spoken: Spoken) -> None:
        """Add a turn of the model."""
        last = self._sequences[-1]
        last.add(completion.token_ids, Source.MODEL)
        last.logprobs.append(completion.logprobs)
        last.versions.append(completion.versions)
        if completion.kept is not None:
            last.kept.append(completion.kept)
        self._grow(spoken)

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

    def _begin(self) -> None:
        self._sequences.append(SequenceDraft(segments=[self._next.text]))
        self._sequences[-1].add(self._next.token_ids, Source.PROMPT)
        self._sequences[-1].media += self._next.media
