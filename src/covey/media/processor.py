"""Patches of images, as transformers' own image processors cut them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from covey.media.errors import MediaError
from covey.media.sizes import Grid, ImageLimits, Kind, grid_of, kind_of, limits_of
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
        """Return the patches of an RGB image, float32 [patches, numbers of a patch], and their grid. The
        patches of a token are neighbours. For a model that takes squares: [squares, 3, pixels, pixels].

        Raises MediaError for a size that the processor refuses, and
        if its grid is another than that of `grid_of`.
        """
        grid = grid_of(*image.size, self.limits)
        values, found = (_squares if self.limits.tile else _patches)(self._loaded(), image, self.limits)
        if found != grid:
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


def _patches(processor: Any, image: Image.Image, limits: ImageLimits) -> tuple[np.ndarray, Grid]:
    """Return the patches of an image of Qwen-VL, and the grid that the processor says."""
    size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    made = processor(images=[image], do_resize=True, size=size, return_tensors="np")
    values = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
    time, down, across = (int(number) for number in made["image_grid_thw"][0])
    assert len(values) == time * down * across, "a grid counts the patches of an image"
    return values, (time, down, across)


def _squares(processor: Any, image: Image.Image, limits: ImageLimits) -> tuple[np.ndarray, Grid]:
    """Return the squares of an image and their patches down and across."""
    # Gemma's processor says nothing of rows and columns, of which it makes one.
    told = {"return_row_col_info": True} if hasattr(processor, "return_row_col_info") else {}
    made = processor(images=[image], return_tensors="np", **told)
    side = limits.tile
    values = np.ascontiguousarray(made["pixel_values"], dtype=np.float32).reshape(-1, 3, side, side)
    rows, columns = (max(1, int(np.ravel(made.get(name, 0))[0])) for name in ("rows", "cols"))
    assert len(values) == rows * columns + (rows * columns > 1), "an image is its squares and the whole"
    return values, (1, rows * (side // limits.patch), columns * (side // limits.patch))


def _load(directory: Path) -> Any:
    """Read the image processor of a model from its files, and run none of the code beside them.

    Its class for PIL is named here: `AutoImageProcessor` of transformers 5.17 asks for torchvision, whichever
    backend it is given.
    """
    # Raises MediaError where the files describe a processor that is not known.
    limits_of(directory)
    try:
        return _class(kind_of(directory)).from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        words = " ".join(str(error).split())
        raise MediaError(
            tr(
                "the image processor in {directory} cannot be loaded: {error}",
                directory=directory,
                error=words,
            )
        ) from error


def _class(kind: Kind) -> Any:
    match kind:
        case "qwen":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            return Qwen2VLImageProcessorPil
        case "gemma":
            from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

            return Gemma3ImageProcessorPil
        case "smolvlm":
            from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

            return SmolVLMImageProcessorPil
