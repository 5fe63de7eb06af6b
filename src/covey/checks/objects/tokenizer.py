"""Compares a tokenizer that a program gives with the one in the directory of the model that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def differences(given: Any, directory: Path) -> tuple[str, ...]:
    """Return in which parts a tokenizer or processor of transformers is another one than that of a
    directory: `tokens`, `images`. How it pads and cuts, and its template, are none of them."""
    import transformers

    is_processor = isinstance(given, transformers.ProcessorMixin)
    kind: Any = transformers.AutoProcessor if is_processor else transformers.AutoTokenizer
    own = kind.from_pretrained(str(directory), local_files_only=True)
    found = []
    if _tokens(given) != _tokens(own):
        found.append("tokens")
    if is_processor and given.image_processor.to_dict() != own.image_processor.to_dict():
        found.append("images")
    return tuple(found)


def _tokens(given: Any) -> Any:
    """Return the settings by which a tokenizer turns text into tokens."""
    tokenizer = getattr(given, "tokenizer", given)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    said = json.loads(backend.to_str())
    return {name: value for name, value in said.items() if name not in ("padding", "truncation")}
