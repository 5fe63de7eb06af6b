"""Why a row is left out, in words, and why data cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from covey.texts import tr

DataFault = Literal["", "line", "encoding", "one_file", "surrogate", "arrow_type", "offline"]
"""Why data cannot be read, where more is known than its words: a line of its file, its encoding, a part asked
of a file that has none, half of a surrogate pair, a column of a type that no table has, or HF_HUB_OFFLINE."""

REASONS: Mapping[str, str] = {
    "no_prompt": tr("without a prompt"),
    "only_answers": tr("whose messages are all of the assistant (roles assistant, gpt and bot)"),
    "too_long": tr("longer than max_length"),
    "cut": tr("cut on the left to max_length"),
    "wrong_type": tr("with a prompt that is neither text nor a list of messages"),
    "history": tr("with a history that is not a list of pairs or messages"),
    "surrogate": tr("with half of a surrogate pair, which no tokenizer can read"),
    "media": tr("with images, audio or video"),
    "image": tr("with an image that cannot be used"),
    "placeholder": tr("with a text that holds the token of an image"),
    "images_lost": tr("with images for which the chat template writes no place"),
    "role": tr("with a message of an unknown role"),
    "tools": tr("with tools that are not a list of functions"),
    "unknown_tool": tr("that name a tool which the run does not have"),
    "lost": tr("with a message that the chat template leaves out"),
    "not_continued": tr("with the beginning of an answer that the chat template cannot continue"),
    "tools_lost": tr("with tools that the chat template leaves out"),
}
"""Words for why a row is left out, by the key that the data gives."""

REFUSED: Mapping[str, str] = {
    "image": "E367",
    "placeholder": "E368",
    "images_lost": "E369",
    "lost": "E360",
    "tools_lost": "E361",
    "role": "E362",
    "tools": "E364",
    "unknown_tool": "E364",
    "not_continued": "E365",
}
"""Reasons that one row is enough for to refuse the data, with their codes."""
