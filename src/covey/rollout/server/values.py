"""Checks of single values that a client and a rollout server send each other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey.texts import joined, tr


class WireError(ValueError):
    """A message that does not have the form of the protocol."""


def parsed(data: bytes) -> Any:
    """JSON; WireError where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(tr("it is not JSON: {data!r}", data=data[:60])) from error


def fields_of(body: Any, names: Sequence[str]) -> dict[str, Any]:
    """A mapping with exactly these names."""
    if not isinstance(body, Mapping) or set(body) != set(names):
        raise WireError(
            tr(
                "{body!r} does not have exactly the fields {names}",
                body=str(body)[:60],
                names=joined(", ", names),
            )
        )
    return dict(body)


def tokens_of(body: Any, vocab: int | None) -> tuple[int, ...]:
    """Token ids, within the vocabulary where one is given."""
    if not isinstance(body, list) or any(type(one) is not int or one < 0 for one in body):
        raise WireError(tr("token ids are not a list of whole numbers"))
    if vocab is not None and body and max(body) >= vocab:
        raise WireError(
            tr("the token id {id} is outside the vocabulary of {vocab}", id=max(body), vocab=vocab)
        )
    return tuple(body)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)
