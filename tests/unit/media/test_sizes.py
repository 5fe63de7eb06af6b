"""Grids are those of transformers' processor and of qwen-vl-utils, for the limits that a model's files write.

What is shown: for 20 sizes and three limits, against numbers that qwen-vl-utils gave, and for 3,000 more
against transformers' own function. Not shown: that a processor applies it; test_processor.py does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from covey.media.errors import MediaError
from covey.media.sizes import ImageLimits, grid_of, limits_of
from unit.media.conftest import QWEN2_5, QWEN3, write_model

OF_QWEN2_5 = ImageLimits(patch=14, merge=2, temporal=2, min_pixels=3136, max_pixels=12845056)
OF_SWIFT = ImageLimits(patch=14, merge=2, temporal=2, min_pixels=3136, max_pixels=1003520)
OF_QWEN3 = ImageLimits(patch=16, merge=2, temporal=2, min_pixels=65536, max_pixels=16777216)

# Rows and columns of patches that `smart_resize` of qwen-vl-utils 0.0.14 gave, called with the sides of a
# token (28, 28, 32) and the limits above.
GRIDS = {
    (1, 1): ((4, 4), (4, 4), (16, 16)),
    (16, 16): ((4, 4), (4, 4), (16, 16)),
    (28, 28): ((4, 4), (4, 4), (16, 16)),
    (42, 42): ((4, 4), (4, 4), (16, 16)),
    (56, 56): ((4, 4), (4, 4), (16, 16)),
    (100, 30): ((2, 8), (2, 8), (10, 30)),
    (224, 224): ((16, 16), (16, 16), (16, 16)),
    (336, 252): ((18, 24), (18, 24), (16, 20)),
    (640, 480): ((34, 46), (34, 46), (30, 40)),
    (480, 640): ((46, 34), (46, 34), (40, 30)),
    (1000, 1000): ((72, 72), (70, 70), (62, 62)),
    (800, 601): ((42, 58), (42, 58), (38, 50)),
    (1023, 769): ((54, 74), (54, 74), (48, 64)),
    (1280, 720): ((52, 92), (52, 92), (44, 80)),
    (1920, 1080): ((78, 138), (52, 94), (68, 120)),
    (3000, 18): ((2, 214), (2, 214), (2, 188)),
    (4000, 20): ((2, 286), (2, 286), (2, 250)),
    (4032, 3024): ((216, 288), (60, 82), (188, 252)),
    (6000, 4000): ((208, 312), (58, 86), (208, 312)),
    (12000, 9000): ((220, 294), (60, 82), (220, 294)),
}


@pytest.mark.parametrize("size", GRIDS, ids="{0[0]}x{0[1]}".format)
def test_grids_of_qwen_vl_utils(size: tuple[int, int]) -> None:
    for limits, grid in zip((OF_QWEN2_5, OF_SWIFT, OF_QWEN3), GRIDS[size], strict=True):
        assert grid_of(*size, limits) == (1, *grid)


@pytest.mark.parametrize("limits", [OF_QWEN2_5, OF_SWIFT, OF_QWEN3, ImageLimits(16, 2, 2, 1024, 3000)])
def test_grids_of_transformers(limits: ImageLimits) -> None:
    """Thin sizes, in which qwen-vl-utils differs, are among them."""
    numbers = random.Random(0)
    num_refused = 0
    for _ in range(3000):
        top = numbers.choice((40, 300, 3000, 20000))
        width, height = numbers.randint(1, top), numbers.randint(1, top)
        try:
            high, wide = smart_resize(height, width, limits.token_side, limits.min_pixels, limits.max_pixels)
        except ValueError:
            num_refused += 1
            with pytest.raises(MediaError):
                grid_of(width, height, limits)
            continue
        assert grid_of(width, height, limits) == (1, high // limits.patch, wide // limits.patch)
    assert 0 < num_refused < 300


def test_a_long_image_is_refused_as_transformers_does() -> None:
    assert grid_of(200, 1, OF_QWEN2_5)[0] == 1
    for width, height in ((201, 1), (1, 201), (20000, 1), (0, 5)):
        with pytest.raises(MediaError) as caught:
            grid_of(width, height, OF_QWEN2_5)
        assert f"an image of {width:,} x {height:,} pixels is too long" in str(caught.value)


def test_a_thin_image_is_not_that_of_qwen_vl_utils() -> None:
    """10 pixels are less than half a token, so the image is brought to 3136 pixels, 560 x 5.6, and its sides
    are rounded up to 20 and 1 tokens. qwen-vl-utils gives (1, 2, 72)."""
    assert grid_of(1000, 10, OF_QWEN2_5) == (1, 2, 40)


def test_tokens_are_merged_patches() -> None:
    assert OF_QWEN2_5.num_tokens((1, 34, 46)) == 17 * 23
    assert replace(OF_QWEN2_5, merge=1).num_tokens((1, 4, 4)) == 16


def limits(tmp_path: Path, settings: object, **given: int) -> ImageLimits:
    return limits_of(write_model(tmp_path / "model", settings), **given)


def without(settings: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in names}


SPELLINGS = {
    "pixels": (QWEN2_5, OF_QWEN2_5),
    "edges": (QWEN3, OF_QWEN3),
    "pixels in size": (
        {
            **without(QWEN2_5, "min_pixels", "max_pixels"),
            "size": {"min_pixels": 3136, "max_pixels": 12845056},
        },
        OF_QWEN2_5,
    ),
    "both, of which pixels count": (
        {**QWEN2_5, "size": {"shortest_edge": 1, "longest_edge": 2}},
        OF_QWEN2_5,
    ),
    "pixels are null": ({**QWEN3, "min_pixels": None, "max_pixels": None}, OF_QWEN3),
    "without a type": (without(QWEN3, "image_processor_type"), OF_QWEN3),
    "nothing": (
        {"image_processor_type": "Qwen2VLImageProcessor"},
        ImageLimits(14, 2, 2, 3136, 1003520),
    ),
}


@pytest.mark.parametrize(("settings", "meant"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_limits_in_every_spelling(tmp_path: Path, settings: object, meant: ImageLimits) -> None:
    assert limits(tmp_path, settings) == meant


def test_limits_within_processor_config_come_first(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {"image_processor": QWEN3}, "processor_config.json")
    assert limits_of(directory) == OF_QWEN3
    assert limits_of(write_model(directory, QWEN2_5)) == OF_QWEN3
    write_model(directory, {"processor_class": "Qwen2VLProcessor"}, "processor_config.json")
    assert limits_of(directory) == OF_QWEN2_5


def test_the_largest_size_is_replaced(tmp_path: Path) -> None:
    assert limits(tmp_path, QWEN2_5, max_pixels=1003520) == OF_SWIFT
    assert limits(tmp_path, QWEN2_5, max_tokens=1280) == OF_SWIFT
    assert limits(tmp_path, QWEN3, max_tokens=1024).max_pixels == 1024 * 32 * 32
    assert limits(tmp_path, QWEN2_5, max_pixels=1003520, max_tokens=100).max_pixels == 78400
    assert limits(tmp_path, QWEN2_5, max_pixels=50000, max_tokens=100).max_pixels == 50000
    # Larger than the model's own.
    assert limits(tmp_path, QWEN2_5, max_pixels=20000000).max_pixels == 20000000


def test_a_limit_below_the_smallest_size_lowers_it(tmp_path: Path) -> None:
    assert limits(tmp_path, QWEN3, max_tokens=32) == ImageLimits(16, 2, 2, 4 * 1024, 32 * 1024)
    assert limits(tmp_path, QWEN3, max_tokens=1) == ImageLimits(16, 2, 2, 1024, 1024)
    assert limits(tmp_path, QWEN3, max_pixels=65536).min_pixels == 65536


def test_a_limit_below_one_token_is_refused(tmp_path: Path) -> None:
    for given in ({"max_pixels": 1023}, {"max_tokens": 0}):
        with pytest.raises(
            MediaError, match=r"one token of this model is 32 x 32 pixels, so set --max_pixels"
        ):
            limits(tmp_path, QWEN3, **given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_processor_type": "LlavaImageProcessor"}, "is of LlavaImageProcessor; covey prepares"),
        ({"feature_extractor_type": "CLIPFeatureExtractor"}, "is of CLIPFeatureExtractor; covey prepares"),
        ({"do_resize": True}, "is of an unknown image processor; covey prepares"),
        ({**QWEN2_5, "patch_size": 0}, "patch_size is 0, not a whole number above 0"),
        ({**QWEN2_5, "merge_size": "2"}, "merge_size is '2', not a whole number above 0"),
        ({**QWEN2_5, "max_pixels": 1.5}, "max_pixels is 1.5, not a whole number above 0"),
        ({**QWEN2_5, "temporal_patch_size": True}, "temporal_patch_size is True, not a whole number"),
        ([1], "has no preprocessor_config.json"),
    ],
)
def test_files_that_describe_no_such_processor(tmp_path: Path, settings: object, words: str) -> None:
    with pytest.raises(MediaError) as caught:
        limits(tmp_path, settings)
    assert words in str(caught.value)


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"has no preprocessor_config\.json"):
        limits_of(tmp_path)
    for content in (b'{"patch_size": ', b"\xff\xfe{"):
        (tmp_path / "preprocessor_config.json").write_bytes(content)
        with pytest.raises(MediaError, match=r"preprocessor_config\.json cannot be read"):
            limits_of(tmp_path)
