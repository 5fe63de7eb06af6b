"""Prompts with images on the real tokenizer and template of Gemma 3, against its own processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import load_codec
from support.real import real

SIZE = {"height": 896, "width": 896}
CONFIG = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {"model_type": "gemma3_text", "vocab_size": 262208},
    "vision_config": {"image_size": 896, "patch_size": 14},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real tokenizer, beside it the sizes of Gemma 3 4B, and two pictures."""
    made = tmp_path_factory.mktemp("gemma")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real("gemma3") / name, made / name)
    (made / "config.json").write_text(json.dumps(CONFIG))
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": SIZE, "do_pan_and_scan": None}
    (made / "preprocessor_config.json").write_text(json.dumps(processor))
    Image.new("RGB", (300, 200), (9, 99, 200)).save(made / "one.png")
    Image.new("RGB", (100, 400), (200, 9, 20)).save(made / "two.png")
    return made


@pytest.mark.parametrize(
    "text",
    [
        "<image>What?",
        "<image>\nWhat?",
        "Look: <image> and\n<image>",
        "<image><image>What differs?",
        "\n<image>\n\n\nWhat?\n",
        "What is it<image>",
        "No image\n\n\n.",
    ],
)
def test_tokens_are_those_of_the_processor(directory: Path, text: str) -> None:
    """Lines around an image join those that the processor writes."""
    images = ["one.png", "two.png"][: text.count("<image>")]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "images": images}
    options = PromptOptions(image_folders=(str(directory),))
    (prompt,) = prompt_table([row], load_codec(directory), max_length=None, options=options).entries
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    own = Gemma3Processor(
        Gemma3ImageProcessorPil(size=SIZE), tokenizer, chat_template=tokenizer.chat_template
    )
    first, *others = text.split("<image>")
    blocks = [{"type": "text", "text": first}] if first else []
    for part in others:
        blocks += [{"type": "image"}, *([{"type": "text", "text": part}] if part else [])]
    asked = [{"role": "user", "content": blocks if images else text}]
    written = own.apply_chat_template(asked, add_generation_prompt=True)
    opened = [Image.open(directory / name) for name in images]
    found = own(text=[written], images=[opened] if opened else None, add_special_tokens=False)
    assert list(prompt.token_ids) == list(found["input_ids"][0])
    assert len(prompt.media) == len(images)
