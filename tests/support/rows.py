"""Random rows to lay out as a stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from covey.token_streams import Row

VOCAB = 96


def random_rows(*families: tuple[int, Sequence[int]], seed: int = 5) -> list[Row]:
    """Rows of several prompts: `random_rows((11, (7, 4)), (6, (9, 5)))` has four, in two families."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for key, (prompt, lengths) in enumerate(families):
        shared = torch.randint(3, VOCAB, (prompt,), generator=generator).tolist()
        for length in lengths:
            own = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            trained = [False] * prompt + [True] * length
            rows.append(Row(token_ids=shared + own, is_trained=trained, prompt_length=prompt, prompt_key=key))
    return rows
