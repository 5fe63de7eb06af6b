"""The help of what every verb takes, apart from its declaration: `covey --help` waits for no pydantic."""

from __future__ import annotations

from collections.abc import Mapping

COMMON: Mapping[str, str] = {
    "help": "Show what a command does and its options; also -h.",
    "version": "Show the version.",
    "lang": "Language of messages, zh or en. Not set: zh if the locale is Chinese, else en.",
}
"""Name and help text."""
