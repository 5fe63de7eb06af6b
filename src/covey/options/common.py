"""The help of what every verb takes, apart from its declaration: `covey --help` waits for no pydantic."""

from __future__ import annotations

from collections.abc import Mapping

COMMON: Mapping[str, str] = {
    "help": "Show what a verb does and its options; also -h.",
    "version": "Show the version.",
    "lang": "Language of messages, zh or en. Not set: Chinese where the locale is.",
}
"""Name and help text."""
