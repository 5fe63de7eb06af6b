"""Directories with the image processors of three models, and images as files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_model(directory: Path, settings: object, name: str = "preprocessor_config.json") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps(settings))
    return directory


@pytest.fixture
def qwen2_5(tmp_path: Path) -> Path:
    return write_model(tmp_path / "qwen2_5", QWEN2_5)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return write_model(tmp_path / "qwen3", QWEN3)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of which every pixel is another."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    noise(40, 30).save(path)
    return path
