"""Images as carriers hold them: what they are, where their tokens stand, never their pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Part = Literal["vit", "aligner", "llm"]
"""A part of a model that sees images: its vision tower, what joins this to the language model, or that."""

PARTS: tuple[Part, ...] = ("vit", "aligner", "llm")
"""All parts, in the order in which an image goes through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """An image of a sequence of tokens, in which `num_tokens` placeholders of id `token_id` stand for it.

    `Medium(key="9f3c…", token_id=151655, num_tokens=64, grid=(1, 16, 16), extent=(1, 8, 8), source=…)`. Equal
    keys are equal pixels at equal sizes. `grid` counts its patches: in time, down and across. `extent` counts
    its placeholders in the same way where the model gives each of them three positions (time, down and
    across); None where positions count on as those of text do. `source` is what its pixels are read from.
    """

    key: str
    token_id: int
    num_tokens: int
    grid: tuple[int, int, int]
    extent: tuple[int, int, int] | None
    source: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """The images of a forward pass, each once, and where their features go: what stands at place x of the
    stream is row `feature_X[x]` of the features of all `media`, end to end; `place_X` are the places."""

    media: tuple[Medium, ...]
    place_X: Tensor
    feature_X: Tensor

    def part(self, first: int, end: int) -> MediaTokens | None:
        """Return the images whose placeholders stand at places from `first` up to `end`, which count from
        `first` then; None without any."""
        is_taken_X = (self.place_X >= first) & (self.place_X < end)
        feature_X = self.feature_X[is_taken_X]
        ends = list(accumulate(medium.num_tokens for medium in self.media))
        number_X = (feature_X[:, None] >= feature_X.new_tensor(ends)).sum(dim=1)
        kept = sorted(set(number_X.tolist()))
        if not kept:
            return None
        media = tuple(self.media[number] for number in kept)
        # How far the features of each image move forward, as others are left out.
        moved, at = [0] * len(self.media), 0
        for number in kept:
            moved[number] = ends[number] - self.media[number].num_tokens - at
            at += self.media[number].num_tokens
        shift_X = feature_X.new_tensor(moved)[number_X]
        return MediaTokens(
            media=media, place_X=self.place_X[is_taken_X] - first, feature_X=feature_X - shift_X
        )
