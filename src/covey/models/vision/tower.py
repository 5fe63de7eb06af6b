"""How a model of transformers sees images: features of its vision tower in place of the placeholders.

An image is encoded once a forward pass, whatever rows hold it. Features are put into the embeddings here, and
not by the model, whose own way expects one row of text for each image.

Axes: P patches, C numbers of a patch, F features of all images, D hidden width, T tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from covey.media.families import FAMILIES
from covey.types import MediaTokens, Medium


class Pixels(NamedTuple):
    """Images as their vision tower takes them: patches (P, C) of all, and the grid (I, 3) of each."""

    patches_PC: Tensor
    grid_I3: Tensor


ReadPixels = Callable[[Sequence[Medium]], Pixels]

WithoutImages = Literal["skip", "zeros", "gradients", "pass"]
"""How a forward pass without images treats the vision tower.

`skip`: nothing. `zeros`: it gives the weights that are trained gradients of zero. `gradients`: it runs the
tower on an image of zeros where gradients are wanted, which then come in the order of those of an image.
`pass`: it always does, so that every rank gathers the weights equally often.
"""


class Vision:
    """The part of a model that sees; `read` gives the pixels of images, on any device."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.token_id: int = config.image_token_id
        self.read: ReadPixels = _no_pixels
        seen = config.vision_config
        # The side in patches of what becomes one feature, and the numbers of a patch.
        self._merge: int = seen.spatial_merge_size
        self._patch: int = seen.in_channels * seen.temporal_patch_size * seen.patch_size**2

    def __deepcopy__(self, memo: Any) -> Vision:
        """Return itself: it holds no weights, and copies of a policy read the same images."""
        return self

    @classmethod
    def of(cls, model: nn.Module) -> Vision | None:
        """Return that of a model, None where it sees nothing."""
        config: Any = model.config
        return cls(model) if config.model_type in FAMILIES else None

    def tower(self, model: nn.Module) -> nn.Module:
        """Return the part of a model, or of its backbone, that has weights for images alone."""
        backbone: Any = model.base_model
        return backbone.visual  # type: ignore[no-any-return]

    def without_images(self, model: nn.Module, tokens_RT: Tensor, how: WithoutImages) -> dict[str, Any]:
        """Return what the language model is called with in place of the tokens of rows without images, as
        `how` says; nothing where the model may be called with the tokens."""
        backbone: Any = model
        trained = [p for p in self.tower(model).parameters() if p.requires_grad]
        has_gradients = bool(trained) and torch.is_grad_enabled()
        if how == "pass" or (how == "gradients" and has_gradients):
            side = self._merge
            blank = Pixels(torch.zeros(side**2, self._patch), torch.tensor([[1, side, side]]))
            features_FD, deep = self._features(backbone, blank, tokens_RT.device)
            embeds_RTD: Tensor = backbone.get_input_embeddings()(tokens_RT)
            nothing = torch.stack([part.sum() for part in (features_FD, *deep)]).sum() * 0
            return {"inputs_embeds": embeds_RTD + nothing.to(embeds_RTD.dtype)}
        if how == "zeros" and has_gradients:
            embeds_RTD = backbone.get_input_embeddings()(tokens_RT)
            return {"inputs_embeds": _ZeroGradients.apply(embeds_RTD, *trained)}
        return {}

    def embedded(self, model: nn.Module, tokens_RT: Tensor, media: MediaTokens) -> dict[str, Any]:
        """Return what the language model is called with in place of the tokens of rows: their embeddings with
        the features of images among them, and what else its layers are given of these."""
        backbone: Any = model
        features_FD, deep = self._features(backbone, self.read(media.media), media.place_X.device)
        planned = sum(medium.num_tokens for medium in media.media)
        assert features_FD.shape[0] == planned, "an image has as many features as placeholders"
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

    def _features(self, backbone: Any, pixels: Pixels, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of the images, and those of further layers where the family has them."""
        weight = next(backbone.visual.parameters())
        patches_PC = pixels.patches_PC.to(device=device, dtype=weight.dtype)
        # Of a tower without a trained weight, not even in an adapter, nothing is kept for a backward pass.
        is_trained = any(parameter.requires_grad for parameter in backbone.visual.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            out = backbone.get_image_features(patches_PC, pixels.grid_I3.to(device), return_dict=True)
            deep = [torch.cat(list(part)) for part in getattr(out, "deepstack_features", None) or ()]
            return torch.cat(list(out.pooler_output)), deep


class _ZeroGradients(torch.autograd.Function):
    """Passes embeddings on; behind it each of the `weights` has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, embeds_RTD: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return embeds_RTD.view_as(embeds_RTD)

    @staticmethod
    def backward(ctx: Any, gradient_RTD: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return gradient_RTD, *zeros


def _no_pixels(media: Sequence[Medium]) -> Pixels:
    raise AssertionError("a policy that is given images is given their pixels")
