"""Models whose vision tower takes squares of one size: Gemma 3 and SmolVLM2.

Axes: P squares of all images, F features of all images, D hidden width, R rows, T tokens of a row or stream,
L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.media_positions import media_stream
from covey.models.vision.tower import Pixels, Vision
from covey.types import Medium
from covey.types.arrays import ints


class SquareVision(Vision):
    """The part of such a model that sees."""

    def blank(self) -> Pixels:
        """Return an image of one square."""
        side: int = self._config.image_size
        patches = side // self._config.patch_size
        return Pixels(torch.zeros(1, 3, side, side), torch.tensor([[1, patches, patches]]))

    @contextmanager
    def given(
        self, model: nn.Module, prompts_RL: Tensor, media: Sequence[Sequence[Medium]]
    ) -> Iterator[dict[str, Any]]:
        """Yield what transformers' `generate` is called with. Its first forward pass is given embeddings in
        the place of the prompts, as the model would encode an image once for each row that holds it."""
        if not any(media):
            yield self.beside_text(prompts_RL)
            return
        sequences = [(ints(ids), tuple(own)) for ids, own in zip(prompts_RL.tolist(), media, strict=True)]
        row_T, column_T = np.indices(prompts_RL.shape).reshape(2, -1)
        tokens = media_stream(sequences, row_T, column_T, prompts_RL.device).media
        assert tokens is not None, "some of the prompts have images"

        def embed(backbone: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hook.remove()
            return args, {**given, "input_ids": None, **self.embedded(backbone, given["input_ids"], tokens)}

        backbone: Any = model.base_model
        hook = backbone.register_forward_pre_hook(embed, with_kwargs=True)
        try:
            yield self.beside_text(prompts_RL)
        finally:
            hook.remove()


class GemmaVision(SquareVision):
    """That of Gemma 3, in which the tokens of an image see each other. transformers makes the masks, so the
    backbone is called in the place of its language model."""

    modules = ("vision_tower", "multi_modal_projector")
    text = ""
    is_causal = False

    def beside_text(self, tokens_RT: Tensor) -> dict[str, Any]:
        """Return which tokens stand for images."""
        return {"token_type_ids": (tokens_RT == self.token_id).int()}

    def seen(self, backbone: Any, pixels: Pixels) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of images."""
        out = backbone.get_image_features(pixels.patches_PC, return_dict=True)
        return out.pooler_output.flatten(0, 1), []


class SmolVision(SquareVision):
    """That of SmolVLM2."""

    modules = ("vision_model", "connector")
    text = "text_model"

    def seen(self, backbone: Any, pixels: Pixels) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of images."""
        out = backbone.get_image_features(pixels.patches_PC[None], return_dict=True)
        return torch.cat(list(out.pooler_output)), []
