"""Names of live objects: what stands in a configuration for a model or for rows that a program holds.

`object Qwen2ForCausalLM (checksum 3f2a91c0)` is a model, `object 128 rows (checksum 77aa01bc)` a table; of a
stream and of what cannot be used there is no checksum. In front of rows may stand the name of a set, as in
`held=object 7 rows (checksum 0badcafe)`.
"""

from __future__ import annotations

import re

STREAM, UNUSABLE = "stream", "unusable"
"""What a name has in place of a checksum."""

_OBJECT = re.compile(
    rf"(?:[\w.-]+=)?(?P<name>object (?P<what>[^()]+) \((?:checksum [0-9a-f]{{8}}|{STREAM}|{UNUSABLE})\))"
)


def object_name(what: str, checksum: str) -> str:
    """The name of an object; `checksum` is 8 hexadecimal digits, STREAM or UNUSABLE."""
    return f"object {what} ({checksum if checksum in (STREAM, UNUSABLE) else f'checksum {checksum}'})"


def is_live(text: str) -> bool:
    """Whether a value of `model` or `dataset` stands for a live object."""
    return _OBJECT.fullmatch(text) is not None


def is_stream(text: str) -> bool:
    """Whether a value stands for rows that are read as they go."""
    return is_live(text) and text.endswith(f"({STREAM})")


def bare_name(text: str) -> str:
    """The name of an object without that of a set in front; any other text as it is."""
    match = _OBJECT.fullmatch(text)
    return match["name"] if match else text


def live_kind(text: str) -> str:
    """What the object is, as `Qwen2ForCausalLM` or `128 rows`; any other text as it is."""
    match = _OBJECT.fullmatch(text)
    return match["what"] if match else text
