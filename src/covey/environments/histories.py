"""Goes on with the conversation that a scheduler has made of an episode: on the very tokens that were sampled
as far as it has left them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from covey.data.text import TextCodec
from covey.environments.draft import EpisodeDraft
from covey.environments.images import with_media
from covey.environments.protocol import History, Message
from covey.environments.rendering import Conversation, Item, Renderer, Rendering, Spoken
from covey.types import Medium, Source

_REWRITTEN = "it writes earlier turns in another way"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidText:
    """Holds the last turn as the scheduler was told it: what the template had `opened`, and what was
    `sampled` behind the tokens `front`, which are empty where the turn begins there."""

    opened: str = ""
    sampled: str = ""
    front: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Holds how an episode goes on, before it is done: `length` tokens stand in front of the next turn.

    Either `messages` with their `media` follow the last turn, or a new sequence begins with `conversation`,
    or the last turn goes on: its first `kept` tokens stay, which are the text `written`, and `rendering` has
    what is written behind them.
    """

    length: int
    rendering: Rendering
    messages: tuple[Message, ...] = ()
    media: tuple[Medium, ...] = ()
    conversation: Conversation | None = None
    kept: int | None = None
    written: str = ""

    def apply(self, draft: EpisodeDraft) -> None:
        """Go on."""
        if self.kept is not None:
            draft.go_on(self.kept, self.rendering.text, self.rendering.token_ids)
        elif self.conversation is not None:
            draft.begin_again(self.conversation, self.rendering)
        else:
            draft.answer(self.messages, self.rendering, Source.ENVIRONMENT, self.media)


def following(
    draft: EpisodeDraft,
    history: History,
    said: SaidText,
    codec: TextCodec,
    renderer: Renderer,
) -> Following:
    """Return how an episode goes on behind its last turn. Raises MediaError and TemplateError."""
    if history.goes_on is not None:
        going_on = _going_on(draft, history.goes_on, said, codec, renderer)
        if going_on is not None:
            return going_on
    messages, media = with_media([m for m in history.messages if "item" not in m], codec)
    if not history.is_rewritten and history.goes_on is None:
        rendering = draft.answered(messages, media)
        return Following(
            length=draft.length_with(rendering), rendering=rendering, messages=messages, media=media
        )
    former, given = draft.conversation, iter(messages)
    kept = former.items[: history.kept]
    rest: list[Item] = [former.items[m["item"]] if "item" in m else next(given) for m in history.messages]
    conversation = replace(
        former,
        items=(*kept, *rest),
        num_trusted=min(former.num_trusted, history.kept),
        media=(*former.media[: _num_images(kept)], *media),
    )
    rendering = draft.restart(conversation, _REWRITTEN)
    return Following(length=len(rendering.token_ids), rendering=rendering, conversation=conversation)


def _going_on(
    draft: EpisodeDraft, wanted: str, said: SaidText, codec: TextCodec, renderer: Renderer
) -> Following | None:
    """Return how the last turn goes on as the text `wanted`; None where no token of it stays."""
    spoken = draft.conversation.items[-1]
    assert isinstance(spoken, Spoken)
    # The token that ended the turn goes: the turn is not over.
    ids = draft.last_ids if spoken.end is None else draft.last_ids[:-1]
    own = _common(wanted.removeprefix(said.opened), said.sampled) if wanted.startswith(said.opened) else ""
    kept = len(ids)
    if own != said.sampled:
        (kept,) = codec.tokens_until(ids, said.sampled, [len(own)]) if own else (0,)
        while kept and not own.startswith(codec.decode_behind(said.front, ids[:kept])):
            kept -= 1
    if not kept:
        return None
    written = codec.decode_behind(said.front, ids[:kept])
    rest = wanted[len(said.opened) + len(written) :]
    added = renderer.encode(rest) if rest else ()
    begun = codec.decode_behind(said.front, ids[:kept], marks=True) + renderer.hide_own(rest)
    return Following(
        length=len(draft.prompt_ids) - (len(draft.last_ids) - kept) + len(added),
        rendering=Rendering(text=begun, token_ids=added, opened=""),
        kept=kept,
        written=written,
    )


def _common(one: str, other: str) -> str:
    """Return the text that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _num_images(items: Sequence[Item]) -> int:
    """Count the blocks of images of messages."""
    return sum(
        isinstance(block, Mapping) and block.get("type") == "image"
        for item in items
        if not isinstance(item, Spoken) and isinstance(item.get("content"), list | tuple)
        for block in item["content"]
    )
