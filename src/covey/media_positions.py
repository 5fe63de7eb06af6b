"""Where the placeholders of images stand in a sequence of tokens, and at which positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from covey.types import Medium
from covey.types.arrays import Ints


def placeholders(token_ids: Ints, media: Sequence[Medium]) -> NDArray[np.int64]:
    """Return where the placeholders of these images stand. ValueError where there are more or fewer."""
    if not media:
        return np.empty(0, dtype=np.int64)
    (token_id,) = {medium.token_id for medium in media}
    place_X = np.flatnonzero(token_ids == token_id)
    planned = sum(medium.num_tokens for medium in media)
    if len(place_X) != planned:
        raise ValueError(f"{len(media)} images have {planned} tokens, but {len(place_X)} stand in the sequence")
    return place_X


def positions_of(token_ids: Ints, media: Sequence[Medium]) -> NDArray[np.int64]:
    """Return the positions (3, L) of a sequence: time, down and across.

    Text has the same one on each axis, one more than the largest before it. The placeholders of an image
    count from there: (0, row, column) for one of a single time. So text goes on behind the longer side of the
    image. Source: Qwen2-VL (arXiv:2409.12191), section 2.1.
    """
    place_X = placeholders(token_ids, media)
    # Each token is one further than the one before it, but behind an image as far as its longer side.
    step_L = np.ones(len(token_ids), dtype=np.int64)
    offset_3L = np.zeros((3, len(token_ids)), dtype=np.int64)
    begin = 0
    for medium in media:
        assert medium.extent is not None
        place_X_of = place_X[begin : begin + medium.num_tokens]
        begin += medium.num_tokens
        step_L[place_X_of] = 0
        step_L[place_X_of[-1]] = max(medium.extent)
        offset_3L[:, place_X_of] = np.indices(medium.extent).reshape(3, -1)
    return np.concatenate([[0], step_L.cumsum()[:-1]]) + offset_3L
