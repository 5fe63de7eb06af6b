"""Data that the runs on real models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from journeys.helpers import write_jsonl


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    asked = [
        f"Tom has {a} coins and buys {a % 5 + 2} more. How many coins does Tom have?" for a in range(2, 34)
    ]
    rows = [{"messages": [{"role": "user", "content": text}], "solution": "7"} for text in asked]
    return write_jsonl(tmp_path_factory.mktemp("data") / "coins.jsonl", rows)
