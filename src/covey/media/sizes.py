"""How many patches an image is cut into: the limits of a model, and the grid of a size.

A grid counts patches in time, down and across; `merge` x `merge` of them become one token of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from covey.media.errors import LimitError, MediaError
from covey.media.tiles import square_of_gemma, squares_of_smolvlm, tiles_of, whole_number
from covey.text_files import read_json
from covey.texts import tr

Grid = tuple[int, int, int]
Kind = Literal["qwen", "gemma", "smolvlm"]

_FILE, _NESTED_FILE, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
# What transformers' Qwen2VLImageProcessor takes for what is not written.
_PATCH, _MERGE, _TEMPORAL, _MIN_PIXELS, _MAX_PIXELS = 14, 2, 2, 56 * 56, 28 * 28 * 1280
# What changes pixels, and what transformers' processors take for that; Qwen's mean and deviation are CLIP's.
_USUAL: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
_PREPARATION: Mapping[Kind, Mapping[str, Any]] = {
    "qwen": {
        "patch_size": _PATCH,
        "merge_size": _MERGE,
        "temporal_patch_size": _TEMPORAL,
        **_USUAL,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "resample": 3,
    },
    "gemma": {**_USUAL, "resample": 2},
    "smolvlm": {**_USUAL, "do_image_splitting": True, "resample": 1},
}
# How the names of their classes begin.
_CLASSES: Mapping[str, Kind] = {"Qwen": "qwen", "Gemma3": "gemma", "SmolVLM": "smolvlm"}
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
    tile        pixels of a side of the squares that an image is cut into, with the whole image in one more
                where there are several; 0 for a model that takes images of any shape

    `ImageLimits(patch=14, merge=2, temporal=2, min_pixels=3136, max_pixels=12845056)` is Qwen2.5-VL's.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    tile: int = 0

    @property
    def token_side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch * self.merge

    @property
    def words(self) -> str:
        """Name the limits in a line of numbers, which differ where the limits do: `14 2 2 3136 12845056`."""
        return " ".join(map(str, self.numbers))

    @property
    def numbers(self) -> list[int]:
        """Return the limits in their order, without a `tile` of 0."""
        return [number for number in astuple(self) if number]

    def num_patches(self, grid: Grid) -> int:
        """Return how many patches the vision tower is given of an image of a grid."""
        tile = (self.tile // self.patch) ** 2 if self.tile else 0
        return math.prod(grid) + (tile if math.prod(grid) > tile else 0)

    def num_tokens(self, grid: Grid) -> int:
        """Return how many tokens of the model an image of a grid is: 391 of (1, 34, 46) where `merge` is
        2."""
        return self.num_patches(grid) // self.merge**2

    def extent(self, grid: Grid) -> tuple[int, int, int] | None:
        """Return the tokens of an image in time, down and across, where each has a position of its own in
        these; None where they count on as text does."""
        return None if self.tile else (grid[0], grid[1] // self.merge, grid[2] // self.merge)

    def runs(self, grid: Grid) -> list[int]:
        """Return how many tokens of an image stand side by side, run after run."""
        tokens = self.num_tokens(grid)
        length = (self.tile // self.patch // self.merge) ** 2 if self.tile else tokens
        return [length] * (tokens // length)


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
    Raises MediaError where no file describes an image processor that covey knows, or the limit is below one
    token or has no effect.
    """
    path, written, kind = _written(directory)
    if kind != "qwen":
        return _tiled(
            directory, path, written, kind, is_limited=max_pixels is not None or max_tokens is not None
        )
    size = written.get("size")
    size = size if isinstance(size, Mapping) else {}
    limits = ImageLimits(
        patch=whole_number(path, "patch_size", written.get("patch_size"), _PATCH),
        merge=whole_number(path, "merge_size", written.get("merge_size"), _MERGE),
        temporal=whole_number(path, "temporal_patch_size", written.get("temporal_patch_size"), _TEMPORAL),
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
    patches within the same limits. "" where no file describes an image processor that covey knows.

    `"patch_size 14, merge_size 2, temporal_patch_size 2, ..., image_mean 0.5 0.5 0.5, ..., resample 3"`
    """
    try:
        _, written, kind = _written(directory)
    except MediaError:
        return ""
    usual = _PREPARATION[kind]
    found = {n: value if written.get(n) is None else written[n] for n, value in usual.items()}
    words = {n: " ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for n, v in found.items()}
    return ", ".join(f"{name} {value}" for name, value in words.items())


def grid_of(width: int, height: int, limits: ImageLimits) -> Grid:
    """Return the grid of an image in patches: that of transformers' image processor.

    For Qwen-VL both sides are rounded to whole tokens. Where that is outside of the limits, they are scaled
    by one factor to the limit and rounded inwards. Beside the limit, a side has at least one token, so a long
    image may have more pixels than `max_pixels`. qwen-vl-utils gives the same grid, except for thin images.
    It rounds a side of half a token or less to one token before the limits are compared, and transformers to
    none, so transformers scales the image to `min_pixels`. Where `max_pixels` leaves a side no token,
    qwen-vl-utils gives it none. For a model that takes squares the grid is that of the squares.

    Raises MediaError where one side is more than 200 times the other.

    `grid_of(640, 480, limits)` of Qwen2.5-VL is `(1, 34, 46)`.
    """
    if limits.tile:
        down, across = tiles_of(width, height, math.isqrt(limits.max_pixels), limits.tile)
        patches = limits.tile // limits.patch
        return 1, down * patches, across * patches
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


def kind_of(directory: Path) -> Kind:
    """Return which image processor a model's files describe. MediaError where it is none that covey knows."""
    return _written(directory)[2]


def _tiled(
    directory: Path, path: Path, written: Mapping[str, Any], kind: Kind, *, is_limited: bool
) -> ImageLimits:
    """Return the sizes of a model that takes squares."""
    config = read_json(directory / "config.json")
    sizes = (square_of_gemma if kind == "gemma" else squares_of_smolvlm)(path, written, config)
    if is_limited:
        words = tr(
            "this model scales each image to squares of {side} pixels, so a limit of pixels or tokens has no "
            "effect",
            side=sizes[-1],
        )
        raise LimitError(words)
    return ImageLimits(*sizes)


def _written(directory: Path) -> tuple[Path, Mapping[str, Any], Kind]:
    """Return the settings of a model's image processor, their file and its kind: those within
    processor_config.json come first, as in transformers."""
    for path in (directory / _NESTED_FILE, directory / _FILE):
        try:
            content = read_json(path)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MediaError(tr("{path} cannot be read: {error}", path=path, error=str(error))) from error
        written = content.get(_NESTED) if path.name == _NESTED_FILE else content
        if isinstance(written, Mapping) and written:
            return path, written, _kind(path, written)
    raise MediaError(
        tr(
            "{directory} has no {file}: either the model takes no images, or that file was not copied with "
            "it",
            directory=directory,
            file=_FILE,
        )
    )


def _kind(path: Path, written: Mapping[str, Any]) -> Kind:
    """Return the kind of an image processor by its settings."""
    name = written.get("image_processor_type") or written.get("feature_extractor_type")
    if name is None and "merge_size" in written:
        return "qwen"
    kind = next((kind for begin, kind in _CLASSES.items() if str(name).startswith(begin)), None)
    if kind is None:
        raise MediaError(
            tr(
                "{path} is of {name}; covey prepares images for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Gemma 3 and "
                "SmolVLM2",
                path=path,
                name=str(name or tr("an unknown image processor")),
            )
        )
    return kind


def _edge(
    path: Path, written: Mapping[str, Any], size: Mapping[str, Any], name: str, edge: str, default: int
) -> int:
    """Return a limit of pixels, under its own name or under that of an edge in `size`."""
    value = written.get(name)
    value = size.get(edge, size.get(name)) if value is None else value
    return whole_number(path, name, value, default)
