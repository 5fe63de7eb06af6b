"""The embedded tokenizer, and model directories with a changed template or settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.data.text import TextCodec, load_codec
from covey.quickstart.task import MODEL_DIR


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    """The embedded tokenizer and template."""
    return load_codec(MODEL_DIR)


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    """The embedded model's text files, with another template or with fields of its files changed."""

    def make(*, template: str | None = None, **files: dict[str, object]) -> Path:
        target = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        target.mkdir()
        for path in MODEL_DIR.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copyfile(path, target / path.name)
        if template is not None:
            (target / "chat_template.jinja").write_text(template, encoding="utf-8")
        for name, fields in files.items():
            path = target / f"{name}.json"
            path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}))
        return target

    return make
