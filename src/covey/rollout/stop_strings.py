"""Stop strings: where a completion ends whose text contains one, the same for every engine.

The text is that of the sampled tokens, without special tokens, as rewards read it. A completion ends with the
first token after which it contains a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from covey.types import GenerationRequest

# What stands at the end of a text whose last character still lacks bytes, and after how many tokens these are
# not waited for any longer: the bytes there are no text.
_UNFINISHED, _MOST_UNFINISHED = "\ufffd", 16


class StopSearch:
    """Looks for stop strings in the text of one completion, token by token.

    Only tokens since the last place where the text was whole are decoded again, with those before them that
    say whether a space stands there; of the text before, as many characters are kept as a stop string may
    begin with.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        self._num_kept = max(map(len, strings)) - 1
        self._kept = ""
        self._ids: list[int] = []
        self._num_known = self._num_known_characters = 0

    def ends_with(self, token_id: int) -> bool:
        """Whether the text contains a stop string with this token, the next one."""
        self._ids.append(token_id)
        decoded = self._decode()
        new = decoded[self._num_known_characters :]
        text = self._kept + new
        is_whole = bool(new) and not new.endswith(_UNFINISHED)
        if is_whole or len(self._ids) - self._num_known >= _MOST_UNFINISHED:
            self._kept = text[max(0, len(text) - self._num_kept) :]
            self._ids = self._ids[self._num_known :]
            self._num_known, self._num_known_characters = len(self._ids), len(self._decode())
        return any(string in text for string in self._strings)

    def first_end(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens, the next ones, it takes until the text contains a stop string; None where
        it does not with all of them."""
        return next((number for number, i in enumerate(token_ids, start=1) if self.ends_with(i)), None)

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


def check_stop_strings(request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
    """ValueError for a request with stop strings where there is no tokenizer to find them with."""
    if request.sampling.stop_strings and tokenizer is None:
        raise ValueError("a request has stop strings, and this engine has no tokenizer to find them with")


def search_for(request: GenerationRequest, tokenizer: Tokenizer | None) -> StopSearch | None:
    """A search for the stop strings of a request; None where it has none."""
    strings = request.sampling.stop_strings
    if not strings:
        return None
    assert tokenizer is not None
    return StopSearch(tokenizer, strings)


def num_until_stop(
    request: GenerationRequest, tokenizer: Tokenizer | None, token_ids: Sequence[int]
) -> int | None:
    """How many of these sampled tokens it takes until the text contains a stop string of the request; None
    where it never does."""
    search = search_for(request, tokenizer)
    return None if search is None else search.first_end(token_ids)
