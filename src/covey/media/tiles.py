"""Images of models whose vision tower takes squares of one size: Gemma 3 and SmolVLM2.

Gemma 3 scales an image to one square. SmolVLM2 scales its longer side to a number of squares, cuts it into
these, and adds the whole image scaled to one more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.media.errors import MediaError
from covey.texts import tr

# No side becomes longer, whatever a file says: transformers' SmolVLMImageProcessor.
_LONGEST = 4096
# What transformers' processors take for what is not written.
_SIDE_OF_GEMMA, _TILE, _LONGEST_EDGE = 224, 364, 4 * 364


def square_of_gemma(path: Path, written: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of Gemma 3 in the order of `ImageLimits`. MediaError for what covey does not do."""
    if written.get("do_pan_and_scan"):
        raise MediaError(
            tr(
                "{path} has do_pan_and_scan: true, which adds crops of an image; covey gives the model the "
                "whole image alone, so set it to false",
                path=path,
            )
        )
    size = written.get("size") or {}
    side = size.get("height", _SIDE_OF_GEMMA)
    vision = config.get("vision_config") or {}
    patch, tokens = vision.get("patch_size", 16), config.get("mm_tokens_per_image", 256)
    _check(path, "size", side == size.get("width", _SIDE_OF_GEMMA) == vision.get("image_size", 224))
    patches = side // patch
    merge = patches // math.isqrt(tokens)
    _check(path, "size", merge > 0 and (patches // merge) ** 2 == tokens)
    return patch, merge, 1, side**2, side**2, side


def squares_of_smolvlm(path: Path, written: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the same of SmolVLM2, whose longer side is the root of the last but one."""
    tile = (written.get("max_image_size") or {}).get("longest_edge", _TILE)
    longest = (written.get("size") or {}).get("longest_edge", _LONGEST_EDGE)
    if written.get("do_image_splitting") is False:
        longest = tile
    vision = config.get("vision_config") or {}
    patch, merge = vision.get("patch_size", 32), config.get("scale_factor", 2)
    _check(path, "max_image_size", tile == vision.get("image_size", 224) and tile // patch % merge == 0)
    return patch, merge, 1, longest**2, longest**2, tile


def _check(path: Path, name: str, is_good: bool) -> None:
    if not is_good:
        words = tr(
            "{path}: {name} is not the one that the sizes in config.json ask for", path=path, name=name
        )
        raise MediaError(words)


def tiles_of(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Return into how many squares an image is cut, down and across; (1, 1) for one that is not cut.

    The numbers of transformers' SmolVLMImageProcessor: `tiles_of(640, 480, 2048, 512)` is (3, 4).
    """
    if longest <= tile:
        return 1, 1
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, max(int(_LONGEST / ratio), 1)
    elif height > width and height > _LONGEST:
        width, height = max(int(_LONGEST * ratio), 1), _LONGEST
    ratio = width / height
    if width >= height:
        across = math.ceil(width / tile)
        return math.ceil(int(across * tile / ratio) / tile), across
    down = math.ceil(height / tile)
    return down, math.ceil(int(down * tile * ratio) / tile)


def written_tiles(down: int, across: int, tokens: int) -> str:
    """Return the text that stands for an image of so many squares of `tokens` each, as SmolVLM2 was trained
    with it."""
    around, seen = "<fake_token_around_image>", "<image>" * tokens
    rows = [
        "".join(f"{around}<row_{row}_col_{column}>{seen}" for column in range(1, across + 1)) + "\n"
        for row in range(1, down + 1)
        if down * across > 1
    ]
    lead = "\n" if rows else ""
    return f"{''.join(rows)}{lead}{around}<global-img>{seen}{around}"
