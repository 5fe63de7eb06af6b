"""Squares are those of transformers' processors of Gemma 3 and SmolVLM2, and so are the texts around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from covey.media.errors import LimitError, MediaError
from covey.media.processor import ImageProcessor
from covey.media.sizes import grid_of, limits_of, preparation_of
from covey.media.tiles import written_tiles
from unit.media.conftest import noise, write_model

MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
GEMMA = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, **MEAN}
SMOLVLM = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 256},
    "max_image_size": {"longest_edge": 64},
    "do_image_splitting": True,
    **MEAN,
}
CONFIGS: dict[str, Any] = {
    "gemma": {"vision_config": {"patch_size": 14, "image_size": 56}, "mm_tokens_per_image": 4},
    "smolvlm": {"vision_config": {"patch_size": 16, "image_size": 64}, "scale_factor": 2},
}
SIZES = (
    *((1, 1), (20000, 1), (1, 20000), (16, 16), (64, 64), (65, 64), (63, 65), (100, 30), (224, 224)),
    *((640, 480), (480, 640), (256, 256), (257, 255), (300, 1), (129, 64), (127, 256), (1000, 10)),
    *((800, 601), (1023, 769), (333, 1000), (255, 64)),
)


@pytest.fixture(params=["gemma", "smolvlm"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A directory of a model, and transformers' own processor."""
    settings = GEMMA if request.param == "gemma" else SMOLVLM
    directory = write_model(tmp_path / "model", settings)
    write_model(directory, CONFIGS[request.param], "config.json")
    own = Gemma3ImageProcessorPil if request.param == "gemma" else SmolVLMImageProcessorPil
    return directory, own(**{k: v for k, v in settings.items() if k != "image_processor_type"})


def test_squares_are_those_of_the_processor(model: tuple[Path, Any]) -> None:
    directory, own = model
    limits = limits_of(directory)
    processor = ImageProcessor(directory, limits)
    is_gemma = isinstance(own, Gemma3ImageProcessorPil)
    for width, height in SIZES:
        image = noise(width, height)
        made = own(images=[image], return_tensors="np", **({} if is_gemma else {"return_row_col_info": True}))
        values, grid = processor.patches(image)
        assert np.array_equal(values, np.asarray(made["pixel_values"]).reshape(values.shape)), (width, height)
        assert grid == grid_of(width, height, limits)
        assert limits.num_tokens(grid) == sum(limits.runs(grid)) == 4 * len(values)
        assert limits.num_patches(grid) == len(values) * (limits.tile // limits.patch) ** 2
        if not is_gemma:
            rows, columns = (int(np.ravel(made[name])[0]) or 1 for name in ("rows", "cols"))
            assert grid == (1, 4 * rows, 4 * columns)


@pytest.mark.parametrize(("down", "across"), [(1, 1), (1, 2), (3, 1), (2, 3), (4, 4)])
def test_the_text_of_an_image_is_that_of_the_processor(down: int, across: int) -> None:
    is_cut = down * across > 1
    marks = "<fake_token_around_image>", "<image>", "<global-img>"
    own = get_image_prompt_string(down * is_cut, across * is_cut, 4, *marks)
    assert written_tiles(down, across, 4) == own


def test_an_image_that_is_not_split_is_one_square(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {**SMOLVLM, "do_image_splitting": False})
    write_model(directory, CONFIGS["smolvlm"], "config.json")
    values, grid = ImageProcessor(directory, limits_of(directory)).patches(noise(300, 100))
    assert values.shape == (1, 3, 64, 64) and grid == (1, 4, 4)


def test_a_limit_of_pixels_has_no_effect(model: tuple[Path, Any]) -> None:
    for limit in ({"max_pixels": 4096}, {"max_tokens": 16}):
        with pytest.raises(LimitError, match="has no effect"):
            limits_of(model[0], **limit)


@pytest.mark.parametrize(
    ("settings", "config", "says"),
    [
        ({**GEMMA, "do_pan_and_scan": True}, CONFIGS["gemma"], "do_pan_and_scan"),
        ({**GEMMA, "size": {"height": 56, "width": 28}}, CONFIGS["gemma"], "size is not"),
        ({**GEMMA, "size": {"height": 28, "width": 28}}, CONFIGS["gemma"], "size is not"),
        (GEMMA, {**CONFIGS["gemma"], "mm_tokens_per_image": 9}, "size is not"),
        ({**SMOLVLM, "max_image_size": {"longest_edge": 32}}, CONFIGS["smolvlm"], "max_image_size is not"),
    ],
)
def test_files_that_do_not_fit_each_other(tmp_path: Path, settings: Any, config: Any, says: str) -> None:
    directory = write_model(tmp_path / "model", settings)
    write_model(directory, config, "config.json")
    with pytest.raises(MediaError, match=says):
        limits_of(directory)
    assert preparation_of(directory)


def test_what_changes_pixels_is_in_the_preparation(model: tuple[Path, Any], tmp_path: Path) -> None:
    own = preparation_of(model[0])
    other = {**(GEMMA if "splitting" not in own else SMOLVLM), "image_mean": [0.1, 0.5, 0.5]}
    assert preparation_of(write_model(tmp_path / "other", other)) != own
