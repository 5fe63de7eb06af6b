"""Pixels of the images of prompts, as a model's own image processor makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from covey.media.processor import ImageProcessor
from covey.media.sizes import ImageLimits
from covey.media.store import MediaStore
from covey.models.vision.tower import Pixels
from covey.types import Medium

_MOST_BYTES = 1 << 30
# How many limits of sizes are kept patches for; a run has one.
_MOST_LIMITS = 2


class PixelReader:
    """Reads images by the image processor of a model's `directory`, and keeps those used last."""

    def __init__(self, directory: Path, *, max_bytes: int = _MOST_BYTES) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._stores: dict[ImageLimits, MediaStore] = {}

    def __call__(self, media: Sequence[Medium]) -> Pixels:
        """Return the patches of images and their grids. Raises MediaError for one that cannot be read, or
        that has changed since its prompt was made."""
        made = [self._store(m).patches(m.source.place.image(), m.key) for m in media]
        for medium, (_, grid) in zip(media, made, strict=True):
            assert grid == medium.grid, "an image has the grid that its prompt was made for"
        patches_PC = torch.from_numpy(np.concatenate([patches for patches, _ in made]))
        return Pixels(patches_PC, torch.tensor([medium.grid for medium in media]))

    def _store(self, medium: Medium) -> MediaStore:
        limits = medium.source.limits
        if limits not in self._stores:
            if len(self._stores) == _MOST_LIMITS:
                self._stores.pop(next(iter(self._stores))).close()
            processor = ImageProcessor(self._directory, limits)
            # What is on the web was allowed when its prompt was made.
            self._stores[limits] = MediaStore(processor, self._max_bytes, may_fetch=True)
        return self._stores[limits]
