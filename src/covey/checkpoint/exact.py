"""JSON that gives back what was put in: the check before anything is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

from covey.errors import CheckpointError
from covey.texts import tr

JSON: TypeAlias = Union[bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"], None]  # noqa: UP007
"""What a component may keep outside of tensors; a tuple comes back as a list."""


def require_json(value: Any, where: str) -> None:
    """Raise CheckpointError at the first part of `value` that JSON would change or refuse.

    `json.dumps` turns the key 1 into "1" without a word, and NaN is no JSON; either would come back from a
    checkpoint as something else. `where` names the value in the message: `require_json({"step": 4},
    "cursor")`.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(tr("{where} is {value}, which JSON cannot hold", where=where, value=value))
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    tr("{where} has the key {key!r}; JSON keeps only text as a key", where=where, key=key)
                )
            require_json(item, f"{where}.{key}")
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]")
        return
    raise CheckpointError(
        tr("{where} is a {name}, which JSON cannot hold", where=where, name=type(value).__name__)
    )
