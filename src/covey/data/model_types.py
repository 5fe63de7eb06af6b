"""The architectures that the installed transformers knows, read from its source, as importing it takes
seconds."""

from __future__ import annotations

import importlib.util
import re
from os.path import isfile
from pathlib import Path

_NAMES = re.compile(r'"([\w.-]+)"\s*[,:]\s*"\w+Config"')


def known_model_types() -> frozenset[str]:
    """Every `model_type` of the installed transformers; empty where it cannot be found."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    auto = Path(spec.origin).parent / "models" / "auto"
    files = [auto / name for name in ("auto_mappings.py", "configuration_auto.py")]
    texts = [file.read_text(encoding="utf-8") for file in files if isfile(file)]
    return frozenset(name for text in texts for name in _NAMES.findall(text))
