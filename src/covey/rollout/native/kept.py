"""Keys and values of rows that have ended, for requests that extend them.

A row is kept from its end until a request extends it, the weights change, the engine rests, or memory is
short: then the one that ended first goes. What is not there any more is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from covey.rollout.native.cache import KVCache
from covey.types import GenerationRequest, Medium, TurnId

# The share of free memory that kept rows may take, beside that of the cache.
_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """Holds keys and values (2, K, n, D) of n tokens, by the number of the layer."""

    layers: dict[int, Tensor]
    length: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all layers together."""
        return sum(tensor.nbytes for tensor in self.layers.values())

    @classmethod
    def of_prompt(cls, cache: KVCache, slot: int, length: int) -> Copied:
        """Copy keys and values of a prompt of `length` tokens out of its slot."""
        first = cache.first_column(length)
        span = slice(first, first + length)
        return cls({n: own[:, slot, :, span].clone() for n, own in cache.prefix.items()}, length)

    @classmethod
    def of_row(cls, cache: KVCache, row: int, length: int) -> Copied:
        """Copy keys and values of the first `length` tokens that a row has sampled."""
        span = slice(cache.start, cache.start + length)
        return cls({n: own[:, row, :, span].clone() for n, own in cache.own.items()}, length)

    def first(self, length: int) -> Copied:
        """Return those of the first `length` tokens."""
        if length == self.length:
            return self
        return Copied({n: own[:, :, :length] for n, own in self.layers.items()}, length)


@dataclass(frozen=True, slots=True, eq=False)
class KeptRow:
    """Holds the tokens of a prompt and of the turn that follows it, and keys and values of all of them except
    the last token, which the model has not read. Siblings share the copy of the prompt."""

    token_ids: tuple[int, ...]
    media: tuple[Medium, ...]
    parts: Sequence[Copied]

    @property
    def length(self) -> int:
        """Return the number of tokens that have keys and values."""
        return sum(part.length for part in self.parts)

    def shared(self, request: GenerationRequest) -> KeptRow | None:
        """Return what a request begins with: the whole row, or as much of it as stands in front of where a
        turn was cut. None where that is nothing, or the images are others."""
        if request.media[: len(self.media)] != self.media:
            return None
        # At least one token of the request is computed.
        most = min(self.length, len(request.prompt_token_ids) - 1)
        pairs = zip(self.token_ids, request.prompt_token_ids[:most], strict=False)
        length = next((n for n, (own, other) in enumerate(pairs) if own != other), most)
        parts, left = [], length
        for part in self.parts:
            parts += [part.first(min(left, part.length))] if left else []
            left -= min(left, part.length)
        return KeptRow(self.token_ids[: length + 1], self.media, parts) if length else None

    def write(self, cache: KVCache, slot: int, prompt: int) -> None:
        """Write keys and values into the slot of a prompt of `prompt` tokens, which they begin."""
        column = cache.first_column(prompt)
        for part in self.parts:
            for layer, pair_2KTD in part.layers.items():
                cache.layer(layer, pair_2KTD[:1])[:, slot, :, column : column + part.length] = pair_2KTD
            column += part.length


@dataclass(slots=True)
class KeptRows:
    """The rows that are kept, in the order in which they ended; `free_bytes` says what memory is free."""

    free_bytes: Callable[[], int]
    _rows: dict[TurnId, KeptRow] = field(default_factory=dict)
    # How many rows each part belongs to, and the bytes of all parts.
    _uses: Counter[Copied] = field(default_factory=Counter)
    _held: int = 0

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, turn: TurnId, row: KeptRow) -> None:
        """Keep a row that has ended, and as many of the former ones as there is memory for."""
        self._drop(turn)
        self._rows[turn] = row
        for part in row.parts:
            self._held += 0 if self._uses[part] else part.num_bytes
            self._uses[part] += 1
        most = _SHARE * (self.free_bytes() + self._held)
        while self._rows and self._held > most:
            self._drop(next(iter(self._rows)))

    def take(self, requests: Sequence[GenerationRequest]) -> KeptRow | None:
        """Return the most of a row that requests of one prompt begin with; the rows that they extend are no
        longer kept."""
        found = [self._drop(r.extends) for r in requests if r.extends is not None]
        usable = [part for row in found if row is not None and (part := row.shared(requests[0])) is not None]
        return max(usable, key=lambda row: row.length, default=None)

    def clear(self) -> None:
        """Drop every row."""
        self._rows.clear()
        self._uses.clear()
        self._held = 0

    def _drop(self, turn: TurnId) -> KeptRow | None:
        """Keep a row no longer, and return it where it was kept."""
        row = self._rows.pop(turn, None)
        for part in () if row is None else row.parts:
            self._uses[part] -= 1
            if not self._uses[part]:
                del self._uses[part]
                self._held -= part.num_bytes
        return row
