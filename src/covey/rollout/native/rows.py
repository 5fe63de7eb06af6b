"""The completions in progress of the native engine, and what a draw needs of them.

Axes: n rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.kernels.draws import Filters
from covey.kernels.protocol import DrawInputs
from covey.media_positions import next_position
from covey.rollout.filters import filters_of
from covey.rollout.native.kept import Copied, KeptRow
from covey.rollout.noise import Ahead
from covey.rollout.stop_strings import StopSearch
from covey.types import Finish, GenerationRequest, KeptSets, Medium
from covey.types.arrays import Versions, ints


@dataclass(slots=True)
class Family:
    """A resident prompt: its slot, its siblings that have not started, and how many are running. Keys and
    values of its first tokens may be those of an earlier turn, `begun`; `copied` are its own, once a sibling
    that ended is kept. `next_position` is that of the token behind the prompt."""

    slot: int
    prompt: tuple[int, ...]
    waiting: deque[int]
    running: int = 0
    media: tuple[Medium, ...] = ()
    begun: KeptRow | None = None
    copied: Copied | None = None
    next_position: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_position = next_position(ints(self.prompt), self.media) if self.media else len(self.prompt)

    @property
    def num_begun(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return 0 if self.begun is None else self.begun.length


@dataclass(slots=True)
class Row:
    """A completion in progress."""

    id: int
    request: GenerationRequest
    family: Family
    key: int
    started: float
    search: StopSearch | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _kept: list[KeptSets] = field(default_factory=list)
    _versions: list[list[int]] = field(default_factory=list)
    has_ended: bool = False

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, kept: KeptSets | None = None
    ) -> Finish | None:
        """Keep what weights of a version drew, up to the row's end; says why it ended if it did. `kept` are
        the sets that filters left."""
        sampling, before, finish = self.request.sampling, len(self.tokens), None
        stops, search = sampling.stop_token_ids, self.search
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token in stops or (search is not None and search.ends_with(token)):
                finish = Finish.STOP
            elif len(self.tokens) >= sampling.max_new_tokens:
                finish = Finish.LENGTH
            if finish is not None:
                break
        if kept is not None:
            self._kept.append(kept.part(0, len(self.tokens) - before))
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append([version, 0])
        self._versions[-1][1] += len(self.tokens) - before
        return finish

    @property
    def kept(self) -> KeptSets | None:
        """The sets that its tokens were drawn from; None without filters."""
        return KeptSets.joined(self._kept) if self._kept else None

    @property
    def versions(self) -> Versions:
        """Which weights drew its tokens."""
        return tuple((version, count) for version, count in self._versions)


@dataclass(slots=True)
class RowState:
    """What draws need to know of some rows beside their logits, (n,) each: the newest token, how many tokens
    there are, temperature and noise key. It follows the rows without the host.

    Where rows share what is computed, `lead_b` are the numbers of those whose tokens are fed and `shared_n`
    says whose hidden state each row draws from. `stops` are the tokens that end some row. `filters` are None
    where no row has any.
    """

    token_n: Tensor
    count_n: Tensor
    temperature_n: Tensor
    key_n: Tensor
    stops: frozenset[int] = frozenset()
    filters: Filters | None = None
    ahead: Ahead | None = None
    lead_b: Tensor | None = None
    shared_n: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors (n,) in the order of the fields, then those of the filters."""
        own = self.token_n, self.count_n, self.temperature_n, self.key_n
        return own if self.filters is None else (*own, *self.filters.tensors)

    @classmethod
    def recorded(cls, tensors: Sequence[Tensor]) -> RowState:
        """Build the state that a recording reads from such tensors."""
        token_n, count_n, temperature_n, key_n, *filters = tensors
        own = Filters.of(filters, may_wait=False) if filters else None
        return cls(token_n, count_n, temperature_n, key_n, filters=own)

    @property
    def fed(self) -> tuple[Tensor, Tensor]:
        """The newest token and how many there are of what is computed, (b,) each."""
        if self.lead_b is None:
            return self.token_n, self.count_n
        return self.token_n[self.lead_b], self.count_n[self.lead_b]

    def spread(self, hidden_bD: Tensor) -> Tensor:
        """What was computed for every row, (n, D)."""
        return hidden_bD if self.shared_n is None else hidden_bD.index_select(0, self.shared_n)

    def inputs(self, table_V: Tensor) -> DrawInputs:
        """What a sampler draws by; `table_V` is the noise's share of each token."""
        own = self.temperature_n, self.key_n, self.count_n, table_V
        return DrawInputs(*own, self.shared_n, self.lead_b, tuple(self.stops), self.filters)

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device, spare: int = 0) -> RowState:
        """With `spare` rows behind them that nobody reads."""
        more, sampling = [0] * spare, [row.request.sampling for row in rows]
        return cls(
            torch.tensor([row.tokens[-1] if row.tokens else 0 for row in rows] + more, device=device),
            torch.tensor([len(row.tokens) for row in rows] + [1] * spare, device=device),
            torch.tensor([own.temperature for own in sampling] + [1.0] * spare, device=device),
            torch.tensor([row.key for row in rows] + more, device=device),
            frozenset[int]().union(*{own.stop_token_ids for own in sampling}),
            filters_of(sampling, device, spare),
        )
