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
_SIDE, _TILE, _LONGEST_EDGE = 224, 364, 4 * 364


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
    vision = _table(config, "vision_config")
    size = _table(written, "size")
    sides = [whole_number(path, "size", size.get(name), _SIDE) for name in ("height", "width")]
    patch = whole_number(path, "patch_size", vision.get("patch_size"), 16)
    tokens = whole_number(path, "mm_tokens_per_image", config.get("mm_tokens_per_image"), 256)
    patches = sides[0] // patch
    merge = max(1, patches // math.isqrt(tokens))
    is_good = [*sides, (patches // merge) ** 2] == [sides[0], vision.get("image_size", _SIDE), tokens]
    _check(path, "size", is_good)
    return patch, merge, 1, sides[0] ** 2, sides[0] ** 2, sides[0]


def squares_of_smolvlm(path: Path, written: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the same of SmolVLM2, whose longer side is the root of the last but one."""
    vision = _table(config, "vision_config")
    edges = {
        name: whole_number(path, name, _table(written, name).get("longest_edge"), usual)
        for name, usual in (("max_image_size", _TILE), ("size", _LONGEST_EDGE))
    }
    tile = edges["max_image_size"]
    longest = tile if written.get("do_image_splitting") is False else edges["size"]
    patch = whole_number(path, "patch_size", vision.get("patch_size"), 32)
    merge = whole_number(path, "scale_factor", config.get("scale_factor"), 2)
    _check(path, "max_image_size", tile == vision.get("image_size", _SIDE) and tile // patch % merge == 0)
    return patch, merge, 1, longest**2, longest**2, tile


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


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


def whole_number(path: Path, name: str, value: Any, default: int) -> int:
    """Return a setting of a file that is a whole number above 0, `default` where it is not written."""
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise MediaError(
            tr("{path}: {name} is {value!r}, not a whole number above 0", path=path, name=name, value=value)
        )
    return value
