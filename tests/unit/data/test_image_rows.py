"""Rows with images, in the forms that people's data has, become prompts that hold as many placeholders."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from covey.data.images import RowImage
from covey.data.rows import PromptOptions, PromptTable, prompt_table
from covey.data.sources import load_source, parse_source
from covey.data.text import TextCodec, load_codec
from covey.data.vision import ImageOptions
from support.vision import IMAGE, picture, save_model

ONE, TWO = picture((200, 40, 90)), picture((10, 220, 30), (32, 24))
"""24 by 16 pixels are 3 by 2 placeholders, 32 by 24 are 4 by 3."""


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(save_model("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "one.png").write_bytes(ONE)
    (tmp_path / "two.png").write_bytes(TWO)
    yield tmp_path


def table_of(codec: TextCodec, folder: Path, *rows: Mapping[str, Any]) -> PromptTable:
    return prompt_table(rows, codec, max_length=None, options=PromptOptions(image_folders=("", str(folder))))


def asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def pil(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


FORMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ms-swift: <image> and paths": lambda d: {
        "messages": asked("<image>What?"),
        "images": [str(d / "one.png")],
    },
    "a relative path": lambda d: {"messages": asked("<image>What?"), "images": ["one.png"]},
    "one path, no list": lambda d: {"messages": asked("<image>What?"), "image": "one.png"},
    "ms-swift: a dict of path and bytes": lambda d: {
        "messages": asked("<image>What?"),
        "images": [{"path": None, "bytes": ONE}],
    },
    "bytes as base64 in JSON": lambda d: {
        "messages": asked("<image>What?"),
        "images": [{"bytes": base64.b64encode(ONE).decode()}],
    },
    "base64 text": lambda d: {
        "messages": asked("<image>What?"),
        "images": [base64.b64encode(ONE).decode()],
    },
    "a data URI": lambda d: {
        "messages": asked("<image>What?"),
        "images": [f"data:image/png;base64,{base64.b64encode(ONE).decode()}"],
    },
    "TRL: images and messages without a place": lambda d: {"prompt": asked("What?"), "images": [pil(ONE)]},
    "TRL: image": lambda d: {"prompt": asked("What?"), "image": pil(ONE)},
    "TRL: blocks with a place": lambda d: {
        "prompt": asked([{"type": "image"}, {"type": "text", "text": "What?"}]),
        "images": [pil(ONE)],
    },
    "blocks that hold the image": lambda d: {
        "messages": asked([{"type": "image", "image": "one.png"}, {"type": "text", "text": "What?"}]),
    },
    "blocks that hold a PIL image": lambda d: {
        "messages": asked([{"type": "image", "image": pil(ONE)}, {"type": "text", "text": "What?"}]),
    },
    "blocks that hold bytes": lambda d: {
        "messages": asked([{"type": "image", "image": ONE}, {"type": "text", "text": "What?"}]),
    },
    "blocks that hold an image as datasets stores it": lambda d: {
        "messages": asked(
            [{"type": "image", "image": {"bytes": ONE, "path": None}}, {"type": "text", "text": "What?"}]
        ),
    },
    "TRL: an array": lambda d: {"prompt": asked("What?"), "image": np.asarray(pil(ONE))},
    "blocks of text with <image>": lambda d: {
        "messages": asked([{"type": "text", "text": "<image>What?"}]),
        "images": ["one.png"],
    },
    "blocks of OpenAI": lambda d: {
        "messages": asked(
            [
                {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(ONE).decode()}"},
                },
                {"type": "text", "text": "What?"},
            ]
        ),
    },
    "blocks of a table, with nulls": lambda d: {
        "prompt": asked(
            [{"type": "image", "text": None}, {"type": "text", "text": "What?"}],
        ),
        "images": [{"bytes": ONE, "path": None}],
    },
    "a question": lambda d: {"question": "What?", "images": ["one.png"]},
    "a prompt text": lambda d: {"prompt": "<image>What?", "images": ["one.png"]},
    "ShareGPT": lambda d: {
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat"}],
        "image": "one.png",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_it_means(form: str, codec: TextCodec, folder: Path) -> None:
    table = table_of(codec, folder, FORMS[form](folder))
    assert not table.left_out, table.details
    (prompt,) = table.entries
    assert list(prompt.token_ids).count(IMAGE) == 6
    (medium,) = prompt.media
    assert (medium.grid, medium.extent, medium.num_tokens) == ((1, 4, 6), (1, 2, 3), 6)
    assert prompt.messages is not None
    assert prompt.messages[-1]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    plain = table_of(codec, folder, FORMS["ms-swift: <image> and paths"](folder)).entries[0]
    assert list(prompt.token_ids) == list(plain.token_ids)
    assert medium.source.place.image() is not None
    # Records of a run hold what names an image, and not the image.
    assert len(json.dumps(dict(prompt.columns))) < 400
    if "PIL" not in form and "TRL" not in form:
        assert medium.key == plain.media[0].key


def test_several_images_stand_in_their_order(codec: TextCodec, folder: Path) -> None:
    rows = [
        {"messages": asked("First <image> then <image>."), "images": ["one.png", "two.png"]},
        {
            "messages": asked([{"type": "image", "image": "two.png"}, {"type": "image"}, "Both?"]),
            "images": ["one.png"],
        },
        {"messages": asked("No image.")},
        {"prompt": asked("Two?"), "images": ["two.png", "one.png"]},
        {
            "messages": [
                {"role": "system", "content": "Look."},
                *asked("<image>A?"),
                {"role": "assistant", "content": "B."},
                *asked("And <image>?"),
            ],
            "images": ["one.png", "two.png"],
        },
    ]
    table = table_of(codec, folder, *rows)
    assert not table.left_out, table.details
    one, two = 6, 12
    assert [[m.num_tokens for m in p.media] for p in table.entries] == [
        [one, two],
        [two, one],
        [],
        [two, one],
        [one, two],
    ]
    first = list(table.entries[0].token_ids)
    run = [number for number, token in enumerate(first) if token == IMAGE]
    assert run[one] - run[one - 1] > 1, "text stands between the images"


def test_bytes_of_a_table_are_read_again_and_not_kept(codec: TextCodec, folder: Path) -> None:
    path = folder / "rows.parquet"
    images = datasets.Features({"question": datasets.Value("string"), "images": [datasets.Image()]})
    rows = {"question": ["A?", "B?"], "images": [[{"bytes": ONE}], [{"bytes": TWO}, {"bytes": ONE}]]}
    datasets.Dataset.from_dict(rows, features=images).to_parquet(path)
    loaded = load_source(parse_source(str(path)), use_hf=True, seed=0, shuffle=False).rows
    table = prompt_table(loaded, codec, max_length=None)
    assert not table.left_out, table.details
    places = [medium.source.place for prompt in table.entries for medium in prompt.media]
    assert all(isinstance(place, RowImage) for place in places)
    assert [place.image().data for place in places] == [ONE, TWO, ONE]


def test_limits_of_a_run_make_fewer_tokens(tmp_path: Path, folder: Path) -> None:
    directory = save_model("qwen2_5_vl", tmp_path)
    for options, tokens in (
        (ImageOptions(), 12),
        (ImageOptions(max_pixels=400), 4),
        (ImageOptions(max_tokens=4), 2),
    ):
        codec = load_codec(directory, images=options)
        table = table_of(codec, folder, {"question": "A?", "images": ["two.png"]})
        assert table.entries[0].media[0].num_tokens == tokens


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing": ({"question": "A?", "images": ["none.png"]}, "image", "none.png does not exist"),
    "truncated": ({"question": "A?", "images": [ONE[:150]]}, "image", "cannot be decoded"),
    "no image": ({"question": "A?", "images": ["page.png"]}, "image", "HTML"),
    "more places": (
        {"messages": asked("<image><image>"), "images": ["one.png"]},
        "image",
        "places for them in the text: 2",
    ),
    "more images": (
        {"messages": asked("<image>A?"), "images": ["one.png", "two.png"]},
        "image",
        "images: 2, places for them in the text: 1",
    ),
    "places without images": (
        {"messages": asked("<image>A?")},
        "image",
        "images: 0, places for them in the text: 1",
    ),
    "a token in the text": (
        {"messages": asked("Say <|image_pad|> now"), "images": ["one.png"]},
        "placeholder",
        "<|image_pad|>",
    ),
    "a token of video in the text": ({"question": "<|video_pad|>"}, "placeholder", "<|video_pad|>"),
    "video": ({"messages": asked("A?"), "videos": ["a.mp4"]}, "media", ""),
    "a block of video": ({"messages": asked([{"type": "video", "video": "a.mp4"}])}, "media", ""),
    "a URL": ({"question": "A?", "images": ["https://localhost/a.png"]}, "image", "--allow_image_urls"),
    "too long": ({"question": "A?", "images": ["long.png"]}, "image", "200 times"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_used_is_named_with_its_row(what: str, codec: TextCodec, folder: Path) -> None:
    (folder / "page.png").write_text("<!DOCTYPE html><html></html>")
    Image.new("RGB", (20_000, 1)).save(folder / "long.png")
    row, reason, words = BAD[what]
    table = table_of(codec, folder, {"question": "Fine?"}, row)
    assert dict(table.left_out) == {reason: 1}
    assert table.left_out_rows[reason] == (1,)
    assert words in table.details[reason]


def test_a_prompt_is_never_cut_within_an_image(codec: TextCodec, folder: Path) -> None:
    rows = [{"question": "a" * 60, "images": ["two.png"]}, {"question": "b" * 200}]
    options = PromptOptions(image_folders=(str(folder),), truncation_strategy="left")
    table = prompt_table(rows, codec, max_length=40, options=options)
    assert table.left_out_rows == {"too_long": (0,)}
    assert [len(prompt.token_ids) for prompt in table.entries] == [40]


def test_a_template_without_a_place_is_found(tmp_path: Path, folder: Path) -> None:
    directory = save_model("qwen2_5_vl", tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    table = table_of(load_codec(directory), folder, {"question": "A?", "images": ["one.png"]})
    assert dict(table.left_out) == {"images_lost": 1}
