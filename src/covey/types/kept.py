"""Kept sets: which tokens of the vocabulary the filters of sampling left to draw each token from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from covey.types.arrays import ByValue, bools, ints

if TYPE_CHECKING:
    import numpy as np

    from covey.types.arrays import Bools, Ints

_BITS = 32


def bitmap_words(vocab: int) -> int:
    """Count the int32 words of a bitmap over the vocabulary."""
    return -(-vocab // _BITS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptSets(ByValue):
    """Holds one set of token ids for each of n sampled tokens, as a list or a bitmap, whichever is smaller.

    `counts` (n,) int32 says how many ids each set has. `words` int32 has the sets one behind the other: a
    set's ids in ascending order, or, where a bitmap takes fewer words than ids, the bitmap, whose bit b of
    word w stands for id 32 w + b. `KeptSets.of([[5, 9], [7]], vocab=100)` are two sets.
    """

    vocab: int
    counts: Ints
    words: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", ints(self.counts))
        object.__setattr__(self, "words", ints(self.words))
        if int(self.widths.sum()) != len(self.words):
            raise ValueError(
                f"{len(self.words)} words of kept sets, where their counts need {int(self.widths.sum())}"
            )

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]], vocab: int) -> KeptSets:
        """Build sets from ids in any order. Raises ValueError for an id outside of the vocabulary."""
        import numpy as np

        widest = bitmap_words(vocab)
        parts, counts = [], []
        for ids in sets:
            id_k = np.unique(np.fromiter(ids, np.int64))
            if len(id_k) and (id_k[0] < 0 or id_k[-1] >= vocab):
                raise ValueError(f"a kept set has an id outside of the vocabulary of {vocab}")
            counts.append(len(id_k))
            parts.append(id_k.astype(np.int32) if len(id_k) <= widest else _bitmap(id_k, widest))
        return cls(vocab=vocab, counts=ints(counts), words=ints(np.concatenate([ints(()), *parts])))

    @classmethod
    def of_bitmaps(cls, bitmap_nW: Any, vocab: int) -> KeptSets:
        """Build sets from bitmaps (n, W) of int32, which have no bit beyond the vocabulary."""
        import numpy as np

        num, widest = bitmap_nW.shape
        at_n, at_w = np.nonzero(bitmap_nW)
        taken = bitmap_nW[at_n, at_w].astype("<i4", copy=False)
        bits = np.unpackbits(taken.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        counts = np.bincount(at_n, weights=bits.sum(axis=1), minlength=num).astype(np.int32)
        is_list = counts <= widest
        of_list = is_list[at_n]
        place, bit = np.nonzero(bits[of_list])
        words = np.empty(int(np.minimum(counts, widest).sum()), np.int32)
        is_id = np.repeat(is_list, np.minimum(counts, widest))
        words[is_id] = _BITS * at_w[of_list][place] + bit
        words[~is_id] = bitmap_nW[~is_list].ravel()
        return cls(vocab=vocab, counts=ints(counts), words=ints(words))

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Return the sets of one or several parts one behind the other; all are of one vocabulary."""
        import numpy as np

        (vocab,) = {part.vocab for part in parts}
        return cls(
            vocab=vocab,
            counts=ints(np.concatenate([part.counts for part in parts])),
            words=ints(np.concatenate([part.words for part in parts])),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Ints]:
        """Give the ids of each set, ascending."""
        import numpy as np

        ends = np.cumsum(self.widths)
        for count, width, end in zip(self.counts.tolist(), self.widths.tolist(), ends.tolist(), strict=True):
            own = self.words[end - width : end]
            if count > width:
                bits = np.unpackbits(own.astype("<i4").view(np.uint8), bitorder="little")
                own = ints(np.flatnonzero(bits))
            yield ints(own)

    @property
    def widths(self) -> Ints:
        """Count the words (n,) of each set."""
        import numpy as np

        return ints(np.minimum(self.counts, bitmap_words(self.vocab)))

    @property
    def is_single(self) -> Bools:
        """Return (n,) bool: which sets have a single id. Such a token has no gradient."""
        return bools(self.counts == 1)

    def split(self, sizes: Sequence[int]) -> list[KeptSets]:
        """Return parts of these numbers of sets, one behind the other."""
        import numpy as np

        ends = np.cumsum([0, *sizes])
        word_ends = np.concatenate([[0], np.cumsum(self.widths)])[ends].tolist()
        return [
            KeptSets(vocab=self.vocab, counts=self.counts[start:end], words=self.words[first:last])
            for start, end, first, last in zip(ends, ends[1:], word_ends, word_ends[1:], strict=False)
        ]

    def selected(self, mask: Bools) -> KeptSets:
        """Return the sets of the tokens where a mask (n,) is True."""
        import numpy as np

        words = self.words[np.repeat(mask, self.widths)]
        return KeptSets(vocab=self.vocab, counts=self.counts[mask], words=words)

    def part(self, start: int, end: int) -> KeptSets:
        """Return the sets of tokens [start, end)."""
        first, last = int(self.widths[:start].sum()), int(self.widths[:end].sum())
        return KeptSets(vocab=self.vocab, counts=self.counts[start:end], words=self.words[first:last])

    @property
    def checksum(self) -> int:
        """Return the CRC-32 of the sets: equal sets have equal ones."""
        import numpy as np

        counts = crc32(np.ascontiguousarray(self.counts, "<i4").data, self.vocab)
        return crc32(np.ascontiguousarray(self.words, "<i4").data, counts)

    def lacks(self, token_ids: Sequence[int] | Ints) -> list[int]:
        """Return the places of tokens that their own set does not have; there is a token for each set."""
        import numpy as np

        token_n = np.asarray(token_ids, np.int64)
        if len(token_n) != len(self):
            raise ValueError(f"{len(token_n)} tokens for {len(self)} kept sets")
        width_n = self.widths.astype(np.int64)
        start_n = np.cumsum(width_n) - width_n
        is_map_n = self.counts > width_n
        has_n = np.zeros(len(self), np.bool_)
        maps = np.flatnonzero(is_map_n & (token_n >= 0) & (token_n < self.vocab))
        token = token_n[maps]
        has_n[maps] = self.words[start_n[maps] + token // _BITS] >> (token % _BITS) & 1
        lists = np.flatnonzero(~is_map_n & (width_n > 0))
        # All lists are bisected at once: `first` moves to the last id that is not above the token.
        token, first, rest = token_n[lists], start_n[lists], width_n[lists]
        for _ in range(int(rest.max(initial=1)).bit_length()):
            half = rest // 2
            first += np.where(self.words[first + half] <= token, half, 0)
            rest -= half
        has_n[lists] = self.words[first] == token
        return np.flatnonzero(~has_n).tolist()


def _bitmap(id_k: np.ndarray[Any, Any], widest: int) -> Ints:
    import numpy as np

    bits = np.zeros(widest * _BITS, np.uint8)
    bits[id_k] = 1
    return ints(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))
