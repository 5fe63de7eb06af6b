"""Whether a completion repeats itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_TOKENS, _LEAST_TOKENS = 1024, 32
_NGRAM = 4


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether one token is more than half of a completion, or repeated 4-grams are.

    Its last 1,024 tokens are looked at, as what falls into a loop stays there. Below 32 tokens a completion
    says nothing: a short answer repeats itself easily.
    """
    ids = ids[-_MOST_TOKENS:]
    if len(ids) < _LEAST_TOKENS:
        return False
    if Counter(ids).most_common(1)[0][1] > len(ids) / 2:
        return True
    grams = set(zip(*(ids[i:] for i in range(_NGRAM)), strict=False))
    return len(grams) < (len(ids) - _NGRAM + 1) / 2
