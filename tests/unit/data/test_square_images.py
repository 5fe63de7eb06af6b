"""Rows with images become prompts of Gemma 3 and SmolVLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import TextCodec, load_codec
from covey.media.tiles import written_tiles
from support.squares import IMAGE, TOKENS, save_model
from support.vision import picture


@pytest.fixture(params=["gemma3", "smolvlm"])
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> TextCodec:
    (tmp_path / "one.png").write_bytes(picture((200, 40, 90), (24, 16)))
    (tmp_path / "long.png").write_bytes(picture((10, 220, 30), (20, 80)))
    return load_codec(save_model(request.param, tmp_path / "model"))


def table(codec: TextCodec, folder: Path, content: str, *images: str) -> Any:
    row = {"messages": [{"role": "user", "content": content}], "images": [*images]}
    return prompt_table([row], codec, max_length=None, options=PromptOptions(image_folders=(str(folder),)))


def test_the_text_of_images_is_encoded_as_the_processor_writes_it(codec: TextCodec, tmp_path: Path) -> None:
    """With the number of squares that an image has; text without one is not lost either."""
    (prompt,) = table(codec, tmp_path, "\nLook: <image><image>\n", "one.png", "long.png").entries
    assert codec.vision is not None
    if codec.vision.opening:
        written = ["\n\n<start_of_image>" + "<image_soft_token>" * TOKENS + "<end_of_image>\n\n"] * 2
    else:
        written = [written_tiles(2, 3, TOKENS), written_tiles(3, 1, TOKENS)]
    text = f"<|im_start|>user\n\nLook: {''.join(written)}\n<|im_end|>\n<|im_start|>assistant\n"
    assert tuple(prompt.token_ids) == codec.encode([text])[0]
    assert [m.num_tokens for m in prompt.media] == [part.count("<image") for part in written]
    (plain,) = table(codec, tmp_path, "No image").entries
    assert codec.decode(plain.token_ids).split() == ["user", "No", "image", "assistant"]


def test_a_text_that_holds_a_placeholder_is_left_out(codec: TextCodec, tmp_path: Path) -> None:
    assert codec.vision is not None and IMAGE in codec.banned_token_ids
    # Data writes SmolVLM2's own for an image.
    for token in {*codec.vision.refused} - {"<image>"}:
        assert table(codec, tmp_path, f"A {token} here").left_out == {"placeholder": 1}
    if codec.vision.opening:
        assert set(codec.vision.refused) == {"<start_of_image>", "<image_soft_token>"}
