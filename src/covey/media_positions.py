"""Where the placeholders of images stand in a sequence of tokens, and at which positions.

Axes: L tokens of a sequence, X placeholders, T tokens of a stream of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covey.types import MediaTokens, Medium
from covey.types.arrays import Ints


def placeholders(token_ids: Ints, media: Sequence[Medium]) -> NDArray[np.int64]:
    """Return where the placeholders of these images stand. ValueError where there are more or fewer."""
    if not media:
        return np.empty(0, dtype=np.int64)
    (token_id,) = {medium.token_id for medium in media}
    place_X = np.flatnonzero(token_ids == token_id)
    planned = sum(medium.num_tokens for medium in media)
    if len(place_X) != planned:
        raise ValueError(f"{len(media)} images have {planned} tokens, but {len(place_X)} are in the sequence")
    return place_X


def fits(token_ids: Ints, media: Sequence[Medium]) -> bool:
    """Return whether as many placeholders stand in a sequence as its images have; also without images, whose
    placeholders nobody knows."""
    try:
        placeholders(token_ids, media)
    except ValueError:
        return False
    return True


def positions_of(token_ids: Ints, media: Sequence[Medium]) -> NDArray[np.int64]:
    """Return the positions (3, L) of a sequence: time, down and across.

    Text has the same one on each axis, one more than the largest before it. The placeholders of an image
    count from there: (0, row, column) for one of a single time. So text goes on behind the longer side of the
    image. Source: Qwen2-VL (arXiv:2409.12191), section 2.1. Those of an image without an extent count on as
    text does.
    """
    place_X = placeholders(token_ids, media)
    # Each token is one further than the one before it, but behind an image as far as its longer side.
    step_L = np.ones(len(token_ids), dtype=np.int64)
    offset_3L = np.zeros((3, len(token_ids)), dtype=np.int64)
    begin = 0
    for medium in media:
        if medium.extent is None:
            begin += medium.num_tokens
            continue
        place_X_of = place_X[begin : begin + medium.num_tokens]
        begin += medium.num_tokens
        step_L[place_X_of] = 0
        step_L[place_X_of[-1]] = max(medium.extent)
        offset_3L[:, place_X_of] = np.indices(medium.extent).reshape(3, -1)
    return np.concatenate([[0], step_L.cumsum()[:-1]]) + offset_3L


def next_position(token_ids: Ints, media: Sequence[Medium]) -> int:
    """Return the position of a token of text behind a sequence."""
    if all(medium.extent is None for medium in media):
        return len(token_ids)
    return int(positions_of(token_ids, media).max()) + 1


@dataclass(frozen=True, slots=True)
class MediaStream:
    """The images of a stream, None without any, and its positions: (T,); (3, T) where images have three."""

    media: MediaTokens | None
    positions_T: Tensor


def media_stream(
    sequences: Sequence[tuple[Ints, tuple[Medium, ...]]],
    row_T: NDArray[np.int64],
    column_T: NDArray[np.int64],
    device: torch.device | str,
) -> MediaStream:
    """Return the images and positions of a stream whose token t is number `column_T[t]` of sequence
    `row_T[t]`, or padding behind it."""
    media: dict[Medium, int] = {}
    for _, own in sequences:
        for medium in own:
            media.setdefault(medium, sum(other.num_tokens for other in media))
    longest = int(column_T.max()) + 1
    feature_RL = np.full((len(sequences), longest), -1, dtype=np.int64)
    has_axes = any(medium.extent is not None for medium in media)
    position_3RL = np.tile(np.arange(longest), (3, len(sequences), 1))
    for number, (token_ids, own) in enumerate(sequences):
        if not own:
            continue
        place_X = placeholders(token_ids, own)
        feature_X = np.concatenate([media[m] + np.arange(m.num_tokens) for m in own])
        is_within_X = place_X < longest
        feature_RL[number, place_X[is_within_X]] = feature_X[is_within_X]
        if has_axes:
            end = min(longest, len(token_ids))
            position_3RL[:, number, :end] = positions_of(token_ids, own)[:, :end]
    feature_T = feature_RL[row_T, column_T]
    place_X = np.flatnonzero(feature_T >= 0)
    position_T = position_3RL[:, row_T, column_T] if has_axes else column_T
    tokens = MediaTokens(
        media=tuple(media),
        place_X=torch.from_numpy(place_X).to(device),
        feature_X=torch.from_numpy(feature_T[place_X]).to(device),
    )
    return MediaStream(tokens.part(0, len(row_T)), torch.from_numpy(position_T).to(device))
