"""Finds the text that the chat template writes between two turns, and whether it keeps what was sampled.

The template is rendered with a mark in the place of each turn of the model. Where all that stands around the
marks is what the model has been given so far, what follows the last mark is the text between this turn and
the next one. Where it is not, the template has rewritten the conversation, and a new sequence begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.data.errors import TemplateError
from covey.data.prompt import opened_by
from covey.data.text import TextCodec
from covey.environments.call_format import CallFormat
from covey.environments.untrusted import Untrusted
from covey.media.errors import MediaError
from covey.texts import tr
from covey.types import Medium, ToolCall, Turn

_THOUGHT = re.compile(r"\A(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)\Z", re.DOTALL)
# Behind the turn that the model goes on with.
_GOES_ON = "covey goes on here"
_CANONICAL = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A turn of the model in a conversation.

    `raw` is what it wrote, marks included, without the token that ended it, `end`, which is None where a stop
    string or a limit did. `opened` is what the template had begun of the turn. `content` and `calls` are
    what was read of it, `marks` those marks of `raw` that were sampled as one token.
    """

    raw: str
    opened: str = ""
    end: int | None = None
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    marks: frozenset[str] = frozenset()

    @property
    def written(self) -> str:
        """The whole turn, as the template is given it."""
        return self.opened + self.raw

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of a data set: text and calls apart."""
        return Turn(text=self.raw, content=self.content, calls=self.calls).messages()[0]


Item = Mapping[str, Any] | Spoken
"""A message of somebody else, or a turn of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Holds the input of a rendering: messages and turns in order, `tools` and arguments of the template.

    The first `num_trusted` items come from the data set, whose marks are control tokens. `media` are the
    images of the messages, each of them a block `{"type": "image"}`, in their order.
    """

    items: tuple[Item, ...]
    num_trusted: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """The text in front of a turn, the token ids of what is new of it (the token that ended the former turn
    was sampled), and what it has opened of the turn. `rewritten` says why it is the beginning of a new
    sequence; "" where it goes on from what was sampled. `media` are the images of the tokens. Hidden marks
    are private characters in `text`, and an image is one token there."""

    text: str
    token_ids: tuple[int, ...]
    opened: str
    rewritten: str = ""
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsAlike:
    """Says of which turns the template writes calls that stand in their text as it writes calls that are
    given apart: those that call alone, and those with text in front. Other turns are given apart."""

    alone: bool
    behind_text: bool

    def holds_for(self, turn: Spoken) -> bool:
        """Return whether a turn may go to the template as one text."""
        return not turn.calls or (self.behind_text if turn.content.strip() else self.alone)


ALL_ALIKE = CallsAlike(alone=True, behind_text=True)
"""Of templates that are given no calls."""


def calls_alike(codec: TextCodec, form: CallFormat | None) -> CallsAlike:
    """Render a call within the text of a turn and apart, and compare what the template writes up to the next
    turn; spaces between text and call aside, which are the model's."""
    if form is None:
        return ALL_ALIKE
    call = ToolCall(name="covey_probe", arguments={"alpha": "beta"})
    return CallsAlike(
        alone=_writes_alike(codec, "", form.write([call]), call),
        behind_text=_writes_alike(codec, "covey says", form.write([call]), call),
    )


def _writes_alike(codec: TextCodec, said: str, written: str, call: ToolCall) -> bool:
    asked = {"role": "user", "content": "covey asks"}
    answer = {"role": "tool", "name": call.name, "content": "covey answers"}
    tools = [{"type": "function", "function": {"name": call.name, "description": "", "parameters": {}}}]
    text = f"{said}\n{written}" if said else written
    apart = Spoken(raw="", content=said, calls=(call,)).message()
    try:
        one, other = (
            "".join(codec.render([asked, turn, answer], tools=tools).split())
            for turn in ({"role": "assistant", "content": text}, apart)
        )
    except TemplateError:
        return False
    return one == other


class Renderer:
    """Renders conversations for one model. `calls_alike` says which calls the template writes as the model
    does (see `CallsAlike`). `lead` is what the template writes in front of the text of a turn where the model
    writes it itself: the line break behind `<|assistant|>` of GLM."""

    def __init__(self, codec: TextCodec, calls_alike: CallsAlike) -> None:
        self._codec, self._calls_alike = codec, calls_alike
        self._untrusted = Untrusted(codec)
        self.lead = _lead(codec)

    def start(self, conversation: Conversation, rewritten: str = "") -> Rendering:
        """Render a whole conversation as the prompt of a new sequence, which goes on with the last message
        where that is the assistant's. Raises TemplateError where the template does not write that."""
        messages, is_begun = self._messages(conversation), self.begun(conversation) is not None
        text = self._begun(conversation, messages) if is_begun else self._render(conversation, messages)
        return self._rendering(conversation, text, text, rewritten, is_whole=True)

    def begun(self, conversation: Conversation) -> str | None:
        """Return the last message, its marks hidden, where it is the assistant's: the next turn goes on with
        it."""
        last = self._messages(conversation)[-1:]
        return str(last[0]["content"]) if last and last[0]["role"] == "assistant" else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that is written behind a turn; its special marks are characters."""
        return self._untrusted.encode(self.hide_own(text))

    def hide(self, text: str) -> str:
        """Return a text that is written into a message of the data set with its marks hidden."""
        return self._untrusted.hide(text)

    def hide_own(self, text: str) -> str:
        """Return a text of the assistant with its special marks hidden; others, such as `</think>`, are part
        of what a model writes."""
        return self._untrusted.hide_own(text, frozenset())

    def follow(self, conversation: Conversation, segments: Sequence[str]) -> Rendering:
        """Render what stands between the last turn and the next one.

        `segments` are the texts in front of each turn of the running sequence, its prompt first; earlier
        turns are part of that prompt.
        """
        last = conversation.items[_turns(conversation)[-1]]
        assert isinstance(last, Spoken)
        if not self._calls_alike.holds_for(last):
            return self.start(conversation, "the template writes calls in another way than the model")
        text = self._behind_marks(conversation, segments)
        if text is None:
            return self.start(conversation, "the template writes earlier turns in another way")
        end = "" if last.end is None else self._codec.tokenizer.id_to_token(last.end) or ""
        if not text.startswith(end):
            return self.start(conversation, f"the template does not end this turn with {end}")
        return self._rendering(conversation, text, text[len(end) :])

    def shown(self, text: str) -> str:
        """Return a text whose marks were hidden as it was written."""
        return self._untrusted.shown(text)

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        return [
            dict(item) if number < conversation.num_trusted else self._message(item)  # type: ignore[arg-type]
            for number, item in enumerate(conversation.items)
        ]

    def _message(self, item: Item) -> dict[str, Any]:
        """Return what the template is given of an item that is not to be trusted."""
        if not isinstance(item, Spoken):
            content = item.get("content")
            if item["role"] == "assistant" and isinstance(content, str):
                return {**item, "content": self.hide_own(content)}
            return self._untrusted.hidden_message(item)
        if not self._calls_alike.holds_for(item):
            return item.message()
        text = item.written.removeprefix(self.lead)
        return {"role": "assistant", "content": self._untrusted.hide_own(text, item.marks)}

    def _behind_marks(self, conversation: Conversation, segments: Sequence[str]) -> str | None:
        """Return what stands behind the last turn; None where something before it has changed."""
        own = _turns(conversation)[-len(segments) :]
        others = self._messages(conversation)
        for style in range(2):
            marked, written = list(others), []
            for segment, number in zip(segments, own, strict=True):
                item = conversation.items[number]
                assert isinstance(item, Spoken)
                content = _marked(item.written, number, style)
                given = content.removeprefix(self.lead)
                marked[number] = {"role": "assistant", "content": given}
                written.append(segment.removesuffix(item.opened) + content)
            text, before = self._render(conversation, marked), "".join(written)
            if text.startswith(before):
                return text[len(before) :] if self._keeps_words(conversation, segments, others) else None
        return None

    def _keeps_words(
        self, conversation: Conversation, segments: Sequence[str], messages: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Return whether the template writes the turns themselves too, spaces aside: some cut a text at words
        that a mark has not, such as `<answer>`."""
        written = []
        for segment, number in zip(segments, _turns(conversation)[-len(segments) :], strict=True):
            item = conversation.items[number]
            assert isinstance(item, Spoken)
            written += [segment.removesuffix(item.opened), messages[number]["content"]]
        before = "".join("".join(written).split())
        return "".join(self._render(conversation, messages).split()).startswith(before)

    def _render(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._codec.render(messages, tools=conversation.tools, kwargs=conversation.arguments)

    def _begun(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render up to the end of the last message, which no mark closes."""
        *before, last = messages
        marked = [*before, {**last, "content": f"{last['content']}{_GOES_ON}"}]
        text = self._codec.render(
            marked, tools=conversation.tools, kwargs=conversation.arguments, add_generation_prompt=False
        )
        begun, found, _ = text.rpartition(_GOES_ON)
        if not found:
            raise TemplateError(tr("the chat template does not write the last turn of the assistant"))
        return begun

    def _rendering(
        self, conversation: Conversation, text: str, new: str, rewritten: str = "", *, is_whole: bool = False
    ) -> Rendering:
        """The rendering whose `new` text, which may be the whole one, has the newest images of the
        conversation. Raises MediaError where the template does not write a place for each image."""
        ids, vision = self._untrusted.encode(new), self._codec.vision
        media = conversation.media
        if media and vision is not None:
            places = ids.count(vision.token_id)
            media = media if is_whole else media[len(media) - min(places, len(media)) :]
            if len(media) != places:
                raise MediaError(
                    tr(
                        "the chat template does not write each image (images: {num}, places for them: "
                        "{places})",
                        places=places,
                        num=len(media),
                    )
                )
            ids = vision.expanded(ids, media)
        return Rendering(text=text, token_ids=ids, opened=opened_by(text), rewritten=rewritten, media=media)


def _lead(codec: TextCodec) -> str:
    """Return the space that the template writes between what opens a turn and the text of the turn."""
    asked, said = {"role": "user", "content": "covey asks"}, "covey says"
    try:
        prompt = codec.render([asked])
        whole = codec.render([asked, {"role": "assistant", "content": said}], add_generation_prompt=False)
    except TemplateError:
        return ""
    lead, found, _ = whole.removeprefix(prompt).partition(said)
    return lead if whole.startswith(prompt) and found and not lead.strip() else ""


def _turns(conversation: Conversation) -> list[int]:
    return [n for n, item in enumerate(conversation.items) if isinstance(item, Spoken)]


def _marked(written: str, number: int, style: int) -> str:
    """Return a turn with marks in place of its words. A thought keeps its place: as the model wrote it in
    style 0, as most templates write it in style 1."""
    thought = _THOUGHT.match(written)
    if thought is None:
        lead = written[: len(written) - len(written.lstrip())]
        return f"{lead}covey{number}says" if written.strip() else written
    begins, words, ends, rest = thought.groups()
    if style:
        begins, ends = _CANONICAL
    return "".join(
        [
            begins,
            f"covey{number}thinks" if words.strip() else "",
            ends,
            f"covey{number}says" if rest.strip() else "",
        ]
    )
