"""How a model of transformers sees images: features of its vision tower in place of the placeholders.

An image is encoded once a forward pass, whatever rows hold it. Features are put into the embeddings here, and
not by the model, whose own way expects one row of text for each image.

Here is what all families have in common, and those of Qwen; others are in covey.models.vision.squares.

Axes: P patches, C numbers of a patch, F features of all images, D hidden width, T tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from covey.media.families import FAMILIES
from covey.types import MediaTokens, Medium


class Pixels(NamedTuple):
    """Images as their vision tower takes them: patches (P, C) of all, or squares (P, 3, side, side) where it
    takes these, and the grid (I, 3) of each."""

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
    """The part of a model that sees; `read` gives the pixels of images, on any device.

    `modules` of the backbone see, and are followed by its `text` module. A model that is not `is_causal` lets
    the tokens of an image see each other, so its rows are neither packed nor share prompts.
    """

    modules: tuple[str, ...] = ("visual",)
    text = "language_model"
    is_causal = True

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.token_id: int = config.image_token_id
        self.read: ReadPixels = _no_pixels
        self._config: Any = config.vision_config

    def __deepcopy__(self, memo: Any) -> Vision:
        """Return itself: it holds no weights, and copies of a policy read the same images."""
        return self

    @classmethod
    def of(cls, model: nn.Module) -> Vision | None:
        """Return that of a model, None where it sees nothing."""
        # These are subclasses of this class.
        from covey.models.vision.squares import GemmaVision, SmolVision

        config: Any = model.config
        if config.model_type not in FAMILIES:
            return None
        others: dict[str, type[Vision]] = {"gemma3": GemmaVision, "smolvlm": SmolVision}
        return others.get(config.model_type, Vision)(model)

    def towers(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a model, or of its backbone, that have weights for images alone."""
        return [getattr(model.base_model, name) for name in self.modules]

    def blank(self) -> Pixels:
        """Return the smallest image."""
        side: int = self._config.spatial_merge_size
        numbers = self._config.in_channels * self._config.temporal_patch_size * self._config.patch_size**2
        return Pixels(torch.zeros(side**2, numbers), torch.tensor([[1, side, side]]))

    def beside_text(self, tokens_RT: Tensor) -> dict[str, Any]:
        """Return what the language model is called with beside rows of tokens or their embeddings."""
        return {}

    def without_images(self, model: nn.Module, tokens_RT: Tensor, how: WithoutImages) -> dict[str, Any]:
        """Return what the language model is called with in place of the tokens of rows without images, as
        `how` says; nothing where the model may be called with the tokens."""
        backbone: Any = model
        trained = [p for tower in self.towers(model) for p in tower.parameters() if p.requires_grad]
        has_gradients = bool(trained) and torch.is_grad_enabled()
        if how == "pass" or (how == "gradients" and has_gradients):
            features_FD, deep = self._features(backbone, self.blank(), tokens_RT.device)
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

    @contextmanager
    def given(
        self, model: nn.Module, prompts_RL: Tensor, media: Sequence[Sequence[Medium]]
    ) -> Iterator[dict[str, Any]]:
        """Yield what transformers' `generate` is called with beside prompts that hold these images, within
        it; also without any, as the model remembers positions of an earlier call."""
        backbone: Any = model
        backbone.base_model.rope_deltas = None
        every = [medium for own in media for medium in own]
        if not every:
            yield {}
            return
        pixels = self.read(every)
        device = prompts_RL.device
        yield {
            "pixel_values": pixels.patches_PC.to(device=device, dtype=next(model.parameters()).dtype),
            "image_grid_thw": pixels.grid_I3.to(device),
            "mm_token_type_ids": (prompts_RL == self.token_id).int(),
        }

    def _features(self, backbone: Any, pixels: Pixels, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of the images, and those of further layers where the family has them."""
        weights = [weight for tower in self.towers(backbone) for weight in tower.parameters()]
        patches_PC = pixels.patches_PC.to(device=device, dtype=weights[0].dtype)
        # Of a tower without a trained weight, not even in an adapter, nothing is kept for a backward pass.
        is_trained = any(weight.requires_grad for weight in weights)
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            return self.seen(backbone, Pixels(patches_PC, pixels.grid_I3.to(device)))

    def seen(self, backbone: Any, pixels: Pixels) -> tuple[Tensor, list[Tensor]]:
        """Return features (F, D) of images on the model's device, and those of further layers."""
        out = backbone.get_image_features(*pixels, return_dict=True)
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
