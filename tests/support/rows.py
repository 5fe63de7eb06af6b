"""Random rows of the tiny models to lay out as a stream."""

from __future__ import annotations

from collections.abc import Sequence

from covey import token_streams
from covey.token_streams import Row

VOCAB = 96


def random_rows(*families: tuple[int, Sequence[int]], seed: int = 5) -> list[Row]:
    """Rows of several prompts: `random_rows((11, (7, 4)), (6, (9, 5)))` has four, in two families."""
    return token_streams.random_rows(families, VOCAB, seed=seed, least=3)
