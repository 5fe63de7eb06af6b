"""How a model of transformers sees images: features of its vision tower in place of the placeholders.

An image is encoded once a forward pass, whatever rows hold it. Features are put into the embeddings here, and
not by the model, whose own way expects one row of text for each image.

Axes: P patches, C numbers of a patch, F features of all images, D hidden width, T tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covey.media.families import FAMILIES
from covey.types import MediaTokens, Medium


class Pixels(NamedTuple):
    """Images as their vision tower takes them: patches (P, C) of all, and the grid (I, 3) of each."""

    patches_PC: Tensor
    grid_I3: Tensor


ReadPixels = Callable[[Sequence[Medium]], Pixels]


class Vision:
    """The part of a model that sees; `read` gives the pixels of images, on any device."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.token_id: int = config.image_token_id
        self.read: ReadPixels = _no_pixels
        # Numbers of a patch, and patches that become one feature.
        self._merged: int = config.vision_config.spatial_merge_size**2

    def __deepcopy__(self, memo: Any) -> Vision:
        """Return itself: it holds no weights, and copies of a policy read the same images."""
        return self

    @classmethod
    def of(cls, model: nn.Module) -> Vision | None:
        """Return that of a model, None where it sees nothing."""
        config: Any = model.config
        return cls(model) if config.model_type in FAMILIES else None

    def embedded(self, model: nn.Module, tokens_RT: Tensor, media: MediaTokens) -> dict[str, Any]:
        """Return what the language model is called with in place of the tokens of rows: their embeddings with
        the features of images among them, and what else its layers are given of these."""
        backbone: Any = model
        features_FD, deep = self._features(backbone, media)
        embeds_RTD: Tensor = backbone.get_input_embeddings()(tokens_RT)
        shape = embeds_RTD.shape
        taken_XD = features_FD.index_select(0, media.feature_X).to(embeds_RTD.dtype)
        flat_TD = embeds_RTD.flatten(0, 1).index_copy(0, media.place_X, taken_XD)
        found: dict[str, Any] = {"inputs_embeds": flat_TD.view(shape)}
        if deep:
            is_image_T = torch.zeros(tokens_RT.numel(), dtype=torch.bool, device=tokens_RT.device)
            found["visual_pos_masks"] = is_image_T.index_fill(0, media.place_X, True).view(tokens_RT.shape)
            found["deepstack_visual_embeds"] = [part.index_select(0, media.feature_X) for part in deep]
        return found

    def given(
        self, model: nn.Module, prompts_RL: Tensor, media: Sequence[Sequence[Medium]]
    ) -> dict[str, Any]:
        """Return what transformers' `generate` is called with beside prompts that hold these images; also
        without any, as the model remembers positions of an earlier call."""
        backbone: Any = model
        backbone.base_model.rope_deltas = None
        every = [medium for own in media for medium in own]
        if not every:
            return {}
        pixels = self.read(every)
        device = prompts_RL.device
        return {
            "pixel_values": pixels.patches_PC.to(device=device, dtype=next(model.parameters()).dtype),
            "image_grid_thw": pixels.grid_I3.to(device),
            "mm_token_type_ids": (prompts_RL == self.token_id).int(),
        }

    def _features(self, backbone: Any, media: MediaTokens) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of the images, and those of further layers where the family has them."""
        weight = next(backbone.visual.parameters())
        device = media.place_X.device
        pixels = self.read(media.media)
        patches_PC = pixels.patches_PC.to(device=device, dtype=weight.dtype)
        out = backbone.get_image_features(patches_PC, pixels.grid_I3.to(device), return_dict=True)
        deep = [torch.cat(list(part)) for part in getattr(out, "deepstack_features", None) or ()]
        features_FD = torch.cat(list(out.pooler_output))
        planned = sum(medium.num_tokens for medium in media.media)
        assert features_FD.shape[0] == planned, "an image has as many features as placeholders"
        return features_FD, deep


def _no_pixels(media: Sequence[Medium]) -> Pixels:
    raise AssertionError("a policy that is given images is given their pixels")
