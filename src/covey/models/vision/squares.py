"""Models whose vision tower takes squares of one size: Gemma 3 and SmolVLM2.

Axes: P squares of all images, F features of all images, D hidden width, R rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covey.models.vision.tower import Pixels, Vision
from covey.types import Medium


class SquareVision(Vision):
    """The part of such a model that sees."""

    def blank(self) -> Pixels:
        """Return an image of one square."""
        side: int = self._config.image_size
        patches = side // self._config.patch_size
        return Pixels(torch.zeros(1, 3, side, side), torch.tensor([[1, patches, patches]]))


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

    def given(
        self, model: nn.Module, prompts_RL: Tensor, media: Sequence[Sequence[Medium]]
    ) -> dict[str, Any]:
        """Return what transformers' `generate` is called with beside prompts that hold these images."""
        every = [medium for own in media for medium in own]
        found = self.beside_text(prompts_RL)
        if every:
            weight = next(model.parameters())
            found["pixel_values"] = self.read(every).patches_PC.to(
                device=prompts_RL.device, dtype=weight.dtype
            )
        return found


class SmolVision(SquareVision):
    """That of SmolVLM2."""

    modules = ("vision_model", "connector")
    text = "text_model"

    def seen(self, backbone: Any, pixels: Pixels) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of images."""
        out = backbone.get_image_features(pixels.patches_PC[None], return_dict=True)
        return torch.cat(list(out.pooler_output)), []

    def given(
        self, model: nn.Module, prompts_RL: Tensor, media: Sequence[Sequence[Medium]]
    ) -> dict[str, Any]:
        """Return what transformers' `generate` is called with beside prompts that hold these images: squares
        (R, most of a row, 3, side, side), zeros behind those of a row with fewer."""
        if not any(media):
            return {}
        weight = next(model.parameters())
        empty = self.blank().patches_PC[:0]
        of_rows = [self.read(own).patches_PC if own else empty for own in media]
        squares = nn.utils.rnn.pad_sequence(of_rows, batch_first=True)
        return {"pixel_values": squares.to(device=prompts_RL.device, dtype=weight.dtype)}
