"""Stop words: which of them an engine looks for in the text of a completion, and which among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.data.text import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWords:
    """`strings` end a completion whose text contains one, `token_ids` are words that are special tokens,
    which no text shows. `hidden` are words with a special token in them, beside that token: no text contains
    them."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    hidden: tuple[tuple[str, str], ...]


def stop_words(codec: TextCodec, words: Sequence[str]) -> StopWords:
    """Stop words as a model's tokenizer makes texts."""
    added = codec.tokenizer.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    strings = tuple(dict.fromkeys(word for word in words if word not in special))
    return StopWords(
        strings=strings,
        token_ids=tuple(dict.fromkeys(special[word] for word in words if word in special)),
        hidden=tuple((word, token) for word in strings for token in special if token in word),
    )
