"""Prompts with images as vLLM takes them: the learner's own tokens and pixels, which no processor touches.

Axes: P patches of an image, C numbers of a patch, X places of placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from covey.media_positions import placeholders
from covey.models.vision.tower import ReadPixels
from covey.rollout.vllm import library
from covey.texts import tr
from covey.types import GenerationRequest, Medium
from covey.types.arrays import ints


class ImagePrompts:
    """Makes what vLLM is given of requests; `read` gives the pixels of images, None where there are none to
    give. `dtype` is the one that vLLM computes in, to which a model casts pixels first of all.

    vLLM knows an image by its key alone, in its caches of features and of prompts. Requests that run at the
    same time share the pixels of an image.
    """

    def __init__(self, llm: Any, read: ReadPixels | None, dtype: str) -> None:
        self._llm, self._read = llm, read
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._items: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for images that cannot be sent, or whose placeholders are not in the prompt."""
        if not request.media:
            return
        if self._read is None:
            raise ValueError(tr("A prompt has an image, but this vLLM was started without their pixels."))
        _places(request.prompt_token_ids, request.media)

    def prompt(self, request: GenerationRequest) -> Any:
        """Return what vLLM is given in place of a prompt. MediaError for an image that cannot be read."""
        token_ids = list(request.prompt_token_ids)
        if not request.media:
            return {"prompt_token_ids": token_ids}
        return library.image_prompt(
            token_ids,
            [self._item(medium) for medium in request.media],
            [medium.key for medium in request.media],
            _places(token_ids, request.media),
        )

    def _item(self, medium: Medium) -> Any:
        item = self._items.get(medium.key)
        if item is None:
            assert self._read is not None
            pixels = self._read([medium])
            item = library.image_item(self._llm, pixels.patches_PC.to(self._dtype), pixels.grid_I3)
            self._items[medium.key] = item
        return item


def check_prompt(request: GenerationRequest, used: Sequence[int] | None) -> None:
    """Raise RuntimeError where vLLM has sampled behind other tokens than those of the prompt; None: it does
    not say."""
    if used is not None and tuple(used) != request.prompt_token_ids:
        raise RuntimeError(
            tr(
                "vLLM sampled behind {used} tokens that are not the {sent} tokens of the prompt.",
                used=len(used),
                sent=len(request.prompt_token_ids),
            )
        )


def _places(token_ids: Sequence[int], media: Sequence[Medium]) -> list[tuple[int, int]]:
    """Return where the placeholders of each image begin, and how many there are. ValueError where they do not
    stand side by side."""
    place_X = placeholders(ints(token_ids), media).tolist()
    places: list[tuple[int, int]] = []
    begin = 0
    for medium in media:
        own = place_X[begin : begin + medium.num_tokens]
        if own[-1] - own[0] + 1 != len(own):
            raise ValueError(tr("The placeholders of an image are not side by side in its prompt."))
        places.append((own[0], len(own)))
        begin += medium.num_tokens
    return places
