"""How a request says how it is drawn, and a completion which tokens the filters kept, between a client and a
rollout server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from covey.plan.check_filters import MOST_LISTED, vllm_lists
from covey.plan.check_stop_words import LONGEST_STOP_WORD, MOST_STOP_WORDS
from covey.rollout.server.values import WireError, fields_of, is_number, tokens_of
from covey.texts import tr
from covey.types import GenerationRequest, KeptSets, SamplingParams
from covey.types.kept import bitmap_words

if TYPE_CHECKING:
    from covey.types.arrays import Ints

ANY_BANS = "any"
"""What a server states whose engine bans whatever a request asks it to."""

_WORD_BYTES = 4
# The bits of each byte that are 1.
_ONES = bytes(value.bit_count() for value in range(256))


def sampling_of(body: Any, vocab: int, engine: str, *, has_tokenizer: bool, bans: str = "") -> SamplingParams:
    """Read how a request is drawn; WireError where it is no such thing, or this server's engine cannot."""
    given = fields_of(body, [field.name for field in fields(SamplingParams)])
    temperature, longest = given["temperature"], given["max_new_tokens"]
    if type(longest) is not int or longest < 1:
        raise WireError("max_new_tokens is a number above 0")
    if not is_number(temperature) or temperature <= 0:
        raise WireError("temperature is a number above 0")
    top_p, top_k, min_p = given["top_p"], given["top_k"], given["min_p"]
    if not is_number(top_p) or not 0 < top_p <= 1:
        raise WireError("top_p is a number above 0 and at most 1")
    if type(top_k) is not int or not 0 <= top_k <= vocab:
        raise WireError(f"top_k is a number from 0 to the {vocab} tokens of this server's model")
    if not is_number(min_p) or not 0 <= min_p <= 1:
        raise WireError("min_p is a number from 0 to 1")
    params = SamplingParams(
        temperature=float(temperature),
        max_new_tokens=longest,
        stop_token_ids=tokens_of(given["stop_token_ids"], None),
        stop_strings=_strings(given["stop_strings"]),
        top_p=float(top_p),
        top_k=top_k,
        min_p=float(min_p),
        banned_token_ids=tokens_of(given["banned_token_ids"], vocab),
    )
    if params.stop_strings and not has_tokenizer:
        raise WireError("stop strings need tokenizer.json in the model directory of this server")
    asked = bans_of(params.banned_token_ids)
    if bans not in (ANY_BANS, asked):
        raise WireError(
            f"the request bans the tokens [{asked}] (suppress_tokens of the model's generation_config.json), "
            f"and this server's model [{bans}]"
        )
    if params.has_filters and engine == "vllm" and not vllm_lists(top_k):
        raise WireError(f"vLLM says which tokens filters keep only with a top_k of 1 to {MOST_LISTED:,}")
    return params


def bans_of(token_ids: Iterable[int]) -> str:
    """Return banned tokens as a server states them."""
    return " ".join(map(str, token_ids))


def _strings(body: Any) -> tuple[str, ...]:
    """Read stop strings; WireError where they are too many, too long or no text."""
    if not isinstance(body, list) or len(body) > MOST_STOP_WORDS:
        raise WireError(f"stop_strings is a list of at most {MOST_STOP_WORDS}")
    if any(not isinstance(one, str) or not 1 <= len(one) <= LONGEST_STOP_WORD for one in body):
        raise WireError(f"a stop string is text of 1 to {LONGEST_STOP_WORD} characters")
    return tuple(body)


def kept_body(kept: KeptSets | None) -> dict[str, str] | None:
    """Return kept sets as JSON: their counts and words, little-endian int32 in base64."""
    return None if kept is None else {"counts": _text(kept.counts), "words": _text(kept.words)}


def kept_bytes(requests: Iterable[GenerationRequest], vocab: int) -> int:
    """Count the most bytes that the kept sets of one of these requests take in an answer."""
    longest = max((r.sampling.max_new_tokens for r in requests if r.sampling.has_filters), default=0)
    num_bytes = longest * (1 + bitmap_words(vocab)) * _WORD_BYTES
    # Base64 makes four characters of three bytes.
    return num_bytes + num_bytes // 3 + 1


def kept_of(body: Any, tokens: Sequence[int], sampling: SamplingParams, vocab: int) -> KeptSets | None:
    """Read the kept sets of sampled tokens; WireError where they cannot be theirs."""
    if not sampling.has_filters:
        if body is not None:
            raise WireError(tr("it sent kept tokens for a request without top_p, top_k and min_p"))
        return None
    if body is None:
        raise WireError(tr("it did not send which tokens top_p, top_k and min_p kept"))
    given = fields_of(body, ("counts", "words"))
    counts, words = _ints(given["counts"]), _ints(given["words"])
    if len(counts) != len(tokens):
        raise WireError(
            tr(
                "it sent what filters kept for {sets:,} tokens, but {tokens:,} tokens",
                sets=len(counts),
                tokens=len(tokens),
            )
        )
    if len(counts) and not (counts.min() >= 1 and counts.max() <= vocab):
        raise WireError(tr("it sent a list of kept tokens that is empty or longer than the vocabulary"))
    try:
        kept = KeptSets(vocab=vocab, counts=counts, words=words)
    except ValueError as error:
        raise WireError(tr("it sent {error}", error=error)) from error
    if not _are_sets(kept):
        raise WireError(tr("it sent a list of kept tokens whose length is not the one that it states"))
    if places := kept.lacks(tokens):
        place = places[0]
        raise WireError(
            tr(
                "token {place} ({id}) is not among the tokens that were kept for it",
                place=place,
                id=int(tokens[place]),
            )
        )
    return kept


def _are_sets(kept: KeptSets) -> bool:
    """Whether lists rise within the vocabulary, and bitmaps have as many bits as they are to have."""
    import numpy as np

    widths, widest = kept.widths, bitmap_words(kept.vocab)
    is_bitmap = kept.counts > widest
    is_of_bitmap = np.repeat(is_bitmap, widths)
    ids, owners = kept.words[~is_of_bitmap], np.repeat(np.arange(len(kept)), widths)[~is_of_bitmap]
    if len(ids) and not (ids.min() >= 0 and ids.max() < kept.vocab):
        return False
    if not ((np.diff(ids.astype(np.int64)) > 0) | (np.diff(owners) > 0)).all():
        return False
    bits = kept.words[is_of_bitmap].astype("<i4").view(np.uint8).reshape(-1, widest * _WORD_BYTES)
    ones = np.frombuffer(_ONES, np.uint8)
    beyond = np.arange(widest * _WORD_BYTES * 8).reshape(-1, 8) >= kept.vocab
    unused = np.packbits(beyond, axis=1, bitorder="little")[:, 0]
    has_as_many = ones[bits].sum(axis=1, dtype=np.int64) == kept.counts[is_bitmap]
    return bool(has_as_many.all() and not (bits & unused).any())


def _text(values: Ints) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


def _ints(body: Any) -> Ints:
    import numpy as np

    from covey.types.arrays import ints

    try:
        data = base64.b64decode(body, validate=True) if isinstance(body, str) else b"?"
    except (binascii.Error, ValueError):
        data = b"?"
    if len(data) % _WORD_BYTES:
        raise WireError(tr("its lists of kept tokens are not int32 numbers in base64"))
    return ints(np.frombuffer(data, "<i4"))
