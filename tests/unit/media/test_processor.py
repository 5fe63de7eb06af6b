"""Patches are those of transformers' processors, within the limits, with the grid that was counted before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from covey.media.errors import MediaError
from covey.media.processor import ImageProcessor
from covey.media.sizes import ImageLimits, grid_of, limits_of
from unit.media.conftest import QWEN2_5, QWEN3, noise, write_model

# Those of the table in test_sizes.py that are decoded in a moment.
SIZES = (
    *((1, 1), (16, 16), (28, 28), (42, 42), (56, 56), (100, 30), (224, 224), (336, 252), (640, 480)),
    *((480, 640), (1000, 1000), (800, 601), (1023, 769), (1280, 720), (3000, 18), (4000, 20), (1000, 10)),
    *((7, 1400), (33, 65), (150, 151)),
)
MODELS = {"Qwen2.5-VL": QWEN2_5, "Qwen3-VL": QWEN3}


@pytest.mark.parametrize("model", MODELS)
def test_the_grid_is_the_one_that_was_counted(tmp_path: Path, model: str) -> None:
    directory = write_model(tmp_path / "model", MODELS[model])
    limits = limits_of(directory)
    own = Qwen2VLImageProcessorPil(**MODELS[model])
    processor = ImageProcessor(directory, limits)
    for width, height in SIZES:
        image = Image.new("RGB", (width, height), (200, 100, 50))
        grid = own(images=[image], return_tensors="np")["image_grid_thw"][0].tolist()
        assert list(grid_of(width, height, limits)) == grid
        values, found = processor.patches(image)
        assert list(found) == grid
        assert values.shape == (np.prod(grid), 3 * limits.temporal * limits.patch**2)


@pytest.mark.parametrize("model", MODELS)
def test_the_patches_are_those_of_the_processor(tmp_path: Path, model: str) -> None:
    directory = write_model(tmp_path / "model", MODELS[model])
    image = noise(300, 200)
    values, _ = ImageProcessor(directory, limits_of(directory)).patches(image)
    expected = Qwen2VLImageProcessorPil(**MODELS[model])(images=[image], return_tensors="np")
    assert values.dtype == np.float32 and values.flags.c_contiguous
    assert np.array_equal(values, expected["pixel_values"])
    assert values.std() > 0.1


def test_a_patch_is_the_pixels_of_its_square(tmp_path: Path) -> None:
    """By hand: an image that needs no resizing, normalized to (x / 255 - 0.5) / 0.5. Its patch number 5 is
    the second one of the second token, so row 0 and column 3; a patch has 3 colours, 2 frames, 16 x 16."""
    directory = write_model(tmp_path / "model", QWEN3)
    image = noise(256, 256)
    values, grid = ImageProcessor(directory, limits_of(directory)).patches(image)
    assert grid == (1, 16, 16)
    square = np.asarray(image)[0:16, 48:64].transpose(2, 0, 1) / 127.5 - 1
    expected = np.stack([square, square], axis=1).reshape(-1)
    np.testing.assert_allclose(values[5], expected, rtol=0, atol=1e-6)


def test_limits_change_the_grid(qwen2_5: Path) -> None:
    image = noise(640, 480)
    for limits, grid in (
        (limits_of(qwen2_5), (1, 34, 46)),
        (limits_of(qwen2_5, max_pixels=100352), (1, 18, 26)),
        (limits_of(qwen2_5, max_tokens=4), (1, 2, 4)),
        (ImageLimits(14, 2, 2, 640 * 640, 12845056), (1, 40, 54)),
    ):
        values, found = ImageProcessor(qwen2_5, limits).patches(image)
        assert found == grid == grid_of(640, 480, limits)
        assert len(values) == np.prod(grid)


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_both_names_of_the_processor_are_loaded_without_torchvision(tmp_path: Path, kind: str) -> None:
    directory = write_model(tmp_path / "model", {**QWEN2_5, "image_processor_type": kind})
    processor = ImageProcessor(directory, limits_of(directory))
    assert processor.patches(noise(60, 60))[1] == (1, 4, 4)


def test_settings_within_processor_config_are_used(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {"image_processor": QWEN3}, "processor_config.json")
    assert ImageProcessor(directory, limits_of(directory)).patches(noise(60, 60))[1] == (1, 16, 16)


def test_a_size_that_is_refused(qwen2_5: Path) -> None:
    with pytest.raises(MediaError, match="an image of 20,000 x 1 pixels is too long"):
        ImageProcessor(qwen2_5, limits_of(qwen2_5)).patches(Image.new("RGB", (20000, 1)))


def test_another_grid_than_the_processors_is_an_error(qwen2_5: Path) -> None:
    """Limits of another model, as no function gives them."""
    processor = ImageProcessor(qwen2_5, ImageLimits(16, 2, 2, 3136, 12845056))
    with pytest.raises(
        MediaError, match=r"cuts 640 x 480 pixels into a grid of .*34, 46.*covey counts .*30, 40"
    ):
        processor.patches(noise(640, 480))


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    settings = {**QWEN2_5, "image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    directory = write_model(tmp_path / "model", settings)
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    limits = ImageLimits(14, 2, 2, 3136, 12845056)
    with pytest.raises(MediaError, match=r"model/preprocessor_config\.json is of Own"):
        ImageProcessor(directory, limits).patches(noise(60, 60))
    write_model(directory, {**settings, "image_processor_type": "Qwen2VLImageProcessor"})
    assert ImageProcessor(directory, limits).patches(noise(60, 60))[1] == (1, 4, 4)
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_files(tmp_path: Path) -> None:
    processor = ImageProcessor(tmp_path, ImageLimits(14, 2, 2, 3136, 12845056))
    with pytest.raises(MediaError, match=r"has no preprocessor_config\.json"):
        processor.patches(noise(60, 60))


def test_settings_that_transformers_refuses_are_said(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {**QWEN2_5, "size": "large"})
    with pytest.raises(MediaError, match=r"the image processor in .*model cannot be loaded: "):
        ImageProcessor(directory, limits_of(directory)).patches(noise(60, 60))


def test_sizes_as_older_files_write_them_are_loaded(tmp_path: Path) -> None:
    settings = {**QWEN2_5, "size": {"min_pixels": 3136, "max_pixels": 12845056}}
    for written in (settings, {**settings, "min_pixels": None, "max_pixels": None}):
        directory = write_model(tmp_path / "model", written)
        processor = ImageProcessor(directory, limits_of(directory, max_pixels=100352))
        assert processor.patches(noise(640, 480))[1] == (1, 18, 26)


def test_the_package_imports_neither_torch_nor_transformers() -> None:
    names = ("source", "decode", "sizes", "processor", "store", "fetch", "formats", "pixels", "base64_text")
    code = (
        f"import sys, importlib\nfor name in {names!r}:\n    importlib.import_module('covey.media.' + name)\n"
    )
    code += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
