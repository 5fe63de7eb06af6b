"""Images that tools and environments give: taken out of their messages, and counted in placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.data.images import PlacedImage, blocks_of
from covey.data.messages import MARK
from covey.data.text import TextCodec
from covey.environments.protocol import Message
from covey.media.errors import MediaError
from covey.media.source import sources_of
from covey.texts import tr
from covey.types import Medium, ToolResult

_IMAGE_BLOCKS = ("image", "image_url")


def answer_of(result: ToolResult) -> dict[str, Any]:
    """Return a result as the message of a tool, with its images as blocks that hold them."""
    content: Any = result.content
    if result.images:
        waiting = iter(result.images)
        content = [
            {**block, "image": next(waiting, None)} if block["type"] == "image" else block
            for block in blocks_of(content)
        ]
        content = [block for block in content if block.get("image", block) is not None]
    return {"role": "tool", "name": result.name, "content": content}


def without_images(result: ToolResult) -> str:
    """Return the text of a result for people, with `[image]` in the place of each image."""
    return result.content.replace(MARK, "[image]")


def with_media(
    messages: Sequence[Message], codec: TextCodec
) -> tuple[tuple[Message, ...], tuple[Medium, ...]]:
    """Return messages whose blocks of images hold nothing, and the images in their order. Raises MediaError
    where one cannot be used, and for a model that sees none."""
    media: list[Medium] = []
    return tuple(_taken(message, codec, media) for message in messages), tuple(media)


def _taken(message: Message, codec: TextCodec, media: list[Medium]) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    blocks: list[Any] = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") not in _IMAGE_BLOCKS:
            blocks.append(block)
            continue
        if codec.vision is None:
            raise MediaError(tr("an image was given to a model that takes text only"))
        sources = sources_of(block)
        if len(sources) != 1:
            raise MediaError(tr("a block for one image holds {num}", num=len(sources)))
        media.append(codec.vision.medium(PlacedImage(sources[0]), is_decoded=True))
        blocks.append({"type": "image"})
    return {**message, "content": blocks}
