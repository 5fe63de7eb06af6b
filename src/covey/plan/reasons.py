"""Words for why a row is left out."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "no_prompt": "without a prompt",
    "too_long": "longer than max_length",
    "cut": "cut on the left to max_length",
    "wrong_type": "with a prompt that is no text",
}
"""Words for why a row is left out, by the key that the data gives."""
