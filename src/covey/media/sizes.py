"""How many patches an image is cut into: the limits of a model, and the grid of a size.

A grid counts patches in time, down and across; `merge` x `merge` of them become one token of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from covey.media.errors import LimitError, MediaError
from covey.text_files import read_json
from covey.texts import tr

Grid = tuple[int, int, int]

_FILE, _NESTED_FILE, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
# What transformers' Qwen2VLImageProcessor takes for what is not written.
_PATCH, _MERGE, _TEMPORAL, _MIN_PIXELS, _MAX_PIXELS = 14, 2, 2, 56 * 56, 28 * 28 * 1280
# What changes pixels, and what it takes for that; mean and deviation are those of CLIP.
_PREPARATION: Mapping[str, Any] = {
    "patch_size": _PATCH,
    "merge_size": _MERGE,
    "temporal_patch_size": _TEMPORAL,
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
# The processor refuses longer images.
_MAX_RATIO = 200
# The fewest tokens of an image for qwen-vl-utils, whatever the files of the model say.
_MIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The sizes that a model takes images in.

    patch       pixels of a side of a patch
    merge       patches of a side of a token
    temporal    frames of a patch; an image is repeated to fill them
    min_pixels  an image with fewer is enlarged
    max_pixels  an image with more is reduced

    `ImageLimits(patch=14, merge=2, temporal=2, min_pixels=3136, max_pixels=12845056)` is Qwen2.5-VL's.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int

    @property
    def token_side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch * self.merge

    @property
    def words(self) -> str:
        """Name the limits in a line of numbers, which differ where the limits do: `14 2 2 3136 12845056`."""
        return " ".join(map(str, astuple(self)))


# How ms-swift limits sizes of Qwen's models (swift/model/models/qwen.py, swift/template/vision_utils.py,
# version 4, August 2026) and qwen-vl-utils 0.0.14 does (vision_process.py):
# - The resizing is that of qwen-vl-utils alone: transformers' processor is then called with do_resize=False.
#   The limits are 4 to 16384 tokens, whatever preprocessor_config.json says. Transformers, and vLLM with it,
#   take those of the file: they enlarge small images for Qwen3-VL to 64 tokens, not to 4.
# - MAX_PIXELS becomes IMAGE_MAX_TOKEN_NUM = MAX_PIXELS // token_side**2, where that is not set; so a limit
#   that is no whole number of tokens is rounded down. With qwen-vl-utils before 0.0.12 it is taken as it is.
# - --max_pixels reduces a larger image before that, by torchvision, to the nearest size of at most so many
#   pixels. The rounding to whole tokens that follows may lead above the limit again: 1000 x 1000 at
#   401408 pixels becomes 633 x 633 and 644 x 644, where MAX_PIXELS gives 616 x 616.
# Here all three are the `longest_edge` of transformers' processor, in pixels.
def limits_of(
    directory: Path, *, max_pixels: int | None = None, max_tokens: int | None = None
) -> ImageLimits:
    """Return the limits that a model's files write, with the largest size replaced where one is given.

    max_pixels  pixels of an image, as MAX_PIXELS and --max_pixels of ms-swift
    max_tokens  tokens of an image, as its IMAGE_MAX_TOKEN_NUM; of both limits the lower one counts

    A limit below the model's smallest size lowers that to 4 tokens, as in qwen-vl-utils, or to the limit.
    Raises MediaError where no file describes an image processor of Qwen-VL, or the limit is below one token.
    """
    path, written = _written(directory)
    size = written.get("size")
    size = size if isinstance(size, Mapping) else {}
    limits = ImageLimits(
        patch=_number(path, "patch_size", written.get("patch_size"), _PATCH),
        merge=_number(path, "merge_size", written.get("merge_size"), _MERGE),
        temporal=_number(path, "temporal_patch_size", written.get("temporal_patch_size"), _TEMPORAL),
        min_pixels=_edge(path, written, size, "min_pixels", "shortest_edge", _MIN_PIXELS),
        max_pixels=_edge(path, written, size, "max_pixels", "longest_edge", _MAX_PIXELS),
    )
    pixels_of_token = limits.token_side**2
    given = [*((max_pixels,) if max_pixels is not None else ())]
    given += [max_tokens * pixels_of_token] if max_tokens is not None else []
    if not given:
        return limits
    most = min(given)
    if most < pixels_of_token:
        raise LimitError(
            tr(
                "images of at most {most:,} pixels have no token: one token of this model is {side} x {side} "
                "pixels, so set --max_pixels to {least:,} or more",
                most=most,
                side=limits.token_side,
                least=pixels_of_token,
            )
        )
    least = limits.min_pixels if limits.min_pixels <= most else min(_MIN_TOKENS * pixels_of_token, most)
    return ImageLimits(limits.patch, limits.merge, limits.temporal, least, most)


def preparation_of(directory: Path) -> str:
    """Return in a line how a model's image processor prepares images: by equal lines a file becomes the same
    patches within the same limits. "" where no file describes an image processor of Qwen-VL.

    `"patch_size 14, merge_size 2, temporal_patch_size 2, ..., image_mean 0.5 0.5 0.5, ..., resample 3"`
    """
    try:
        _, written = _written(directory)
    except MediaError:
        return ""
    settings = {name: written.get(name) for name in _PREPARATION}
    found = {n: _PREPARATION[n] if value is None else value for n, value in settings.items()}
    words = {n: " ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for n, v in found.items()}
    return ", ".join(f"{name} {value}" for name, value in words.items())


def grid_of(width: int, height: int, limits: ImageLimits) -> Grid:
    """Return the grid of an image in patches: that of transformers' image processor of Qwen-VL.

    Both sides are rounded to whole tokens. Where that is outside of the limits, they are scaled by one factor
    to the limit and rounded inwards. Beside the limit, a side has at least one token, so a long image may
    have more pixels than `max_pixels`. qwen-vl-utils gives the same grid, except for thin images. It rounds a
    side of half a token or less to one token before the limits are compared, and transformers to none, so
    transformers scales the image to `min_pixels`. Where `max_pixels` leaves a side no token, qwen-vl-utils
    gives it none.

    Raises MediaError where one side is more than 200 times the other.

    `grid_of(640, 480, limits)` of Qwen2.5-VL is `(1, 34, 46)`.
    """
    if min(width, height) < 1 or max(width, height) > _MAX_RATIO * min(width, height):
        raise MediaError(
            tr(
                "an image of {width:,} x {height:,} pixels is too long: the longer side may be {most} times "
                "the shorter one; crop it",
                width=width,
                height=height,
                most=_MAX_RATIO,
            )
        )
    side = limits.token_side
    rows, columns = round(height / side), round(width / side)
    num_pixels = rows * columns * side**2
    if num_pixels > limits.max_pixels:
        reduction = math.sqrt(height * width / limits.max_pixels)
        rows = max(1, math.floor(height / reduction / side))
        columns = max(1, math.floor(width / reduction / side))
    elif num_pixels < limits.min_pixels:
        enlargement = math.sqrt(limits.min_pixels / (height * width))
        rows = math.ceil(height * enlargement / side)
        columns = math.ceil(width * enlargement / side)
    return 1, rows * limits.merge, columns * limits.merge


def num_tokens(grid: Grid, merge: int) -> int:
    """Return how many tokens of the model an image of a grid is: `num_tokens((1, 34, 46), 2)` is 391."""
    return math.prod(grid) // merge**2


def _written(directory: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the settings of a model's image processor and their file: those within processor_config.json
    come first, as in transformers."""
    for path in (directory / _NESTED_FILE, directory / _FILE):
        try:
            content = read_json(path)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MediaError(tr("{path} cannot be read: {error}", path=path, error=str(error))) from error
        written = content.get(_NESTED) if path.name == _NESTED_FILE else content
        if isinstance(written, Mapping) and written:
            return path, _of_qwen(path, written)
    raise MediaError(
        tr(
            "{directory} has no {file}: either the model takes no images, or that file was not copied with "
            "it",
            directory=directory,
            file=_FILE,
        )
    )


def _of_qwen(path: Path, written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings that are those of an image processor of Qwen-VL."""
    name = written.get("image_processor_type") or written.get("feature_extractor_type")
    is_qwen = "merge_size" in written if name is None else str(name).startswith("Qwen")
    if not is_qwen:
        raise MediaError(
            tr(
                "{path} is of {name}; covey prepares images for Qwen2-VL, Qwen2.5-VL and Qwen3-VL",
                path=path,
                name=str(name or tr("an unknown image processor")),
            )
        )
    return written


def _edge(
    path: Path, written: Mapping[str, Any], size: Mapping[str, Any], name: str, edge: str, default: int
) -> int:
    """Return a limit of pixels, under its own name or under that of an edge in `size`."""
    value = written.get(name)
    value = size.get(edge, size.get(name)) if value is None else value
    return _number(path, name, value, default)


def _number(path: Path, name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise MediaError(
            tr("{path}: {name} is {value!r}, not a whole number above 0", path=path, name=name, value=value)
        )
    return value
