"""Words for why a row is left out."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "no_prompt": "without a prompt",
    "too_long": "longer than max_length",
    "cut": "cut on the left to max_length",
    "wrong_type": "with a prompt that is neither text nor a list of messages",
    "history": "with a history that is no list of pairs or messages",
    "surrogate": "with half of a surrogate pair, which no tokenizer reads",
    "media": "with images, audio or video",
    "role": "with a message of an unknown role",
    "tools": "with tools that are no list of functions",
    "lost": "with a message that the chat template leaves out",
    "tools_lost": "with tools that the chat template leaves out",
}
"""Words for why a row is left out, by the key that the data gives."""

REFUSED: Mapping[str, str] = {"lost": "E360", "tools_lost": "E361", "role": "E362", "tools": "E364"}
"""Reasons that one row is enough for to refuse the data, with their codes."""
