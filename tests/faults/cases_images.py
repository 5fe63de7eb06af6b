"""Images that prompts cannot be made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faults.case import Case, jsonl, words
from support.vision import picture, save_model

_GOOD: Mapping[str, Any] = {"question": "What?", "images": ["one.png"], "solution": "1"}


def _laid_out(change: Callable[[Path], None] = lambda here: None) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        (here / "vl").mkdir()
        save_model("qwen2_5_vl", here / "vl")
        (here / "one.png").write_bytes(picture((200, 40, 90)))
        (here / "cut.png").write_bytes(picture((200, 40, 90))[:150])
        (here / "page.png").write_text("<!DOCTYPE html><html></html>")
        change(here)

    return make


def _without_processor(here: Path) -> None:
    (here / "vl" / "preprocessor_config.json").unlink()


def _case(name: str, *rows: Mapping[str, Any], rest: str = "", model: str = "vl", **given: Any) -> Case:
    return Case(
        name=name,
        words=words(
            f"--freeze_vit false {rest}" if model == "vl" else rest, model=model, dataset="rows.jsonl"
        ),
        files={"rows.jsonl": jsonl([*([_GOOD] * 8), *rows])},
        make=_laid_out(**given),
    )


def _asked(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "solution": "1", **columns}


CASES = (
    _case("image_missing", {**_GOOD, "images": ["none.png"]}),
    _case("image_cut_off", {**_GOOD, "images": ["cut.png"]}),
    _case("image_that_is_a_page", {**_GOOD, "images": ["page.png"]}),
    _case("image_on_the_web", {**_GOOD, "images": ["https://localhost/a.png"]}),
    _case("image_places_without_images", _asked("<image>What?")),
    _case("images_without_places", _asked("<image>What?", images=["one.png", "one.png"])),
    _case("image_token_in_a_text", _asked("Say <|image_pad|> twice.")),
    _case("video_of_a_row", _asked("What?", videos=["a.mp4"])),
    _case("images_for_a_model_of_text", model="quickstart"),
    _case("model_without_its_image_processor", change=_without_processor),
    _case(
        "template_that_writes_no_image", rest="--chat_template t.jinja", change=lambda here: _template(here)
    ),
    _case("image_limits_below_a_token", rest="--max_pixels 10"),
)


def _template(here: Path) -> None:
    (here / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
