"""Begins an episode with the prompt of its row, or with the one that an environment has made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.environments.draft import EpisodeDraft
from covey.environments.images import with_media
from covey.environments.protocol import Opened
from covey.environments.rendering import Conversation, Rendering, Spoken
from covey.rollout.running import Running, added_to


def open_draft(one: Running, opened: Opened, codec: TextCodec, agents: Agents) -> None:
    """Begin the draft of an episode. Raises MediaError and TemplateError."""
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
        items, media = with_media(opened.messages, codec)
        conversation, first = replace(conversation, items=items, num_trusted=opened.kept, media=media), None
    if opened.added:
        (said,), media = with_media([{"content": opened.added}], codec)
        grown = added_to(conversation.items, said["content"], agents.renderer.hide)
        conversation = replace(conversation, items=grown, media=(*conversation.media, *media))
        first = None
    if further:
        first = None
    one.draft = EpisodeDraft(agents.renderer, conversation, first)
    if first is None:
        one.begun = codec.written_out(one.draft.prompt_ids), _shown(conversation, agents)


def _shown(conversation: Conversation, agents: Agents) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a prompt as they were written."""
    shown = agents.renderer.shown
    return tuple(
        {**item, "content": shown(item["content"])} if isinstance(item.get("content"), str) else item
        for item in conversation.items
        if not isinstance(item, Spoken)
    )
