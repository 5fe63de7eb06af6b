"""Patches of images, as transformers' own image processors cut them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from covey.media.errors import MediaError
from covey.media.sizes import Grid, ImageLimits, grid_of, limits_of
from covey.texts import tr


class ImageProcessor:
    """Cuts images into patches by the processor that the files in `directory` describe, within `limits`,
    which replace those of the files.

    transformers is imported and the files are read at the first image. Several threads may call it at once.
    """

    def __init__(self, directory: Path, limits: ImageLimits) -> None:
        self.directory, self.limits = directory, limits
        self._lock = threading.Lock()
        self._processor: Any = None

    def patches(self, image: Image.Image) -> tuple[np.ndarray, Grid]:
        """Return the patches of an RGB image, float32 [patches, numbers of a patch], and their grid.

        The patches of a token are neighbours. Raises MediaError for a size that the processor refuses, and
        if its grid is another than that of `grid_of`.
        """
        grid = grid_of(*image.size, self.limits)
        made = self._loaded()(
            images=[image],
            do_resize=True,
            size={"shortest_edge": self.limits.min_pixels, "longest_edge": self.limits.max_pixels},
            return_tensors="np",
        )
        values = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        found = tuple(int(number) for number in made["image_grid_thw"][0])
        if found != grid or len(values) != np.prod(grid):
            raise MediaError(
                tr(
                    "the image processor in {directory} cuts {width} x {height} pixels into a grid of "
                    "{found}, and covey counts {expected}; please report this",
                    directory=self.directory,
                    width=image.width,
                    height=image.height,
                    found=found,
                    expected=grid,
                )
            )
        return values, grid

    def _loaded(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = _load(self.directory)
            return self._processor


def _load(directory: Path) -> Any:
    """Read the image processor of a model of Qwen-VL from its files, and run none of the code beside them.

    Its class for PIL is named here: `AutoImageProcessor` of transformers 5.17 asks for torchvision, whichever
    backend it is given.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    # Raises MediaError where the files describe another processor.
    limits_of(directory)
    try:
        return Qwen2VLImageProcessorPil.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        words = " ".join(str(error).split())
        raise MediaError(
            tr(
                "the image processor in {directory} cannot be loaded: {error}",
                directory=directory,
                error=words,
            )
        ) from error
