"""Keys and values of everything that runs, computed again by weights that have changed.

A row that went on with those of the former weights would sample by neither: its layers would mix both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.kernels.protocol import AttentionOptions
from covey.media_positions import media_stream
from covey.models.attention import StreamLayout
from covey.models.policy import Policy
from covey.rollout.native.cache import KVCache
from covey.rollout.native.rows import Family, Row
from covey.types import Medium, StreamSegment
from covey.types.arrays import Ints, ints

# Tokens of a pass, where a prompt and a row behind it have no more.
_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A prompt and the rows that grow from it, by their numbers in the cache; without any it only waits."""

    family: Family
    rows: Sequence[tuple[int, Row]]


class RefillLayout:
    """A stream of prompts, each with what its rows have sampled behind it. Keys and values of the tokens at
    `prompt_P` go to their slots, those of the tokens at `own_O` to their rows."""

    def __init__(
        self,
        cache: KVCache,
        stream: StreamLayout,
        prompt_P: tuple[Tensor, Tensor, Tensor],
        own_O: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        self._cache, self._stream, self._prompt, self._own = cache, stream, prompt_P, own_O

    def attend(
        self, layer: int, query_1HTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention output (1, H, T, D)."""
        pair_T2KD = torch.cat([key_1KTD, value_1KTD]).permute(2, 0, 1, 3)
        for tensor, (at, number, column) in zip(
            self._cache.tensors(layer, key_1KTD), (self._prompt, self._own), strict=True
        ):
            tensor[:, number, :, column] = pair_T2KD[at]
        return self._stream.attend(layer, query_1HTD, key_1KTD, value_1KTD, options)


def refill(policy: Policy, cache: KVCache, running: Sequence[Running]) -> Iterator[tuple[Family, Tensor]]:
    """Compute what is in the cache again, but for the newest token of each row, which is fed next. Gives each
    prompt with the last hidden state (D,) of its tokens."""
    for part in _parts(running):
        yield from _pass(policy, cache, part)
    held = sorted((number, row) for one in running for number, row in one.rows)
    if held:
        slot_n = torch.tensor([row.family.slot for _, row in held], device=policy.device)
        cache.start_rows(held[0][0], slot_n, max(len(row.family.prompt) for _, row in held))


def _parts(running: Sequence[Running]) -> Iterator[list[Running]]:
    """Return what each pass computes; a prompt is computed once for as many rows as a pass has room for."""
    part: list[Running] = []
    tokens = 0
    for one in running:
        rows: list[tuple[int, Row]] = []
        tokens += len(one.family.prompt)
        for number, row in one.rows:
            if tokens + len(row.tokens) > _MOST_TOKENS and (rows or part):
                yield [*part, *([Running(one.family, rows)] if rows else [])]
                part, rows, tokens = [], [], len(one.family.prompt)
            rows.append((number, row))
            tokens += len(row.tokens)
        part.append(Running(one.family, rows))
    if part:
        yield part


def _pass(policy: Policy, cache: KVCache, part: Sequence[Running]) -> list[tuple[Family, Tensor]]:
    segments: list[StreamSegment] = []
    sequences: list[tuple[Ints, tuple[Medium, ...]]] = []
    tokens: list[int] = []
    # Of each token: its sequence, its number in it, and the slot or row and column that it goes to.
    of_token: list[tuple[int, int, bool, int, int]] = []
    ends: list[tuple[Family, int]] = []
    for one in part:
        family, parent, first = one.family, len(segments), cache.first_column(len(one.family.prompt))
        prompt = len(family.prompt)
        segments.append(StreamSegment(start=len(tokens), length=prompt))
        of_token += [(len(sequences), i, True, family.slot, first + i) for i in range(prompt)]
        tokens += family.prompt
        sequences.append((ints(family.prompt), family.media))
        ends.append((family, len(tokens) - 1))
        for number, row in one.rows:
            if not (own := row.tokens[:-1]):
                continue
            segments.append(StreamSegment(start=len(tokens), length=len(own), parent=parent))
            at = range(len(own))
            of_token += [(len(sequences), prompt + i, False, number, cache.start + i) for i in at]
            tokens += own
            sequences.append((ints([*family.prompt, *own]), family.media))
    device = policy.device
    sequence_T, number_T, is_prompt_T, place_T, column_T = torch.tensor(of_token).T
    prompt_P, own_O = is_prompt_T.nonzero()[:, 0], (1 - is_prompt_T).nonzero()[:, 0]
    layout = RefillLayout(
        cache,
        StreamLayout(segments, device),
        (prompt_P.to(device), place_T[prompt_P].to(device), column_T[prompt_P].to(device)),
        (own_O.to(device), place_T[own_O].to(device), column_T[own_O].to(device)),
    )
    seen = media_stream(sequences, sequence_T.numpy(), number_T.numpy(), device)
    hidden_TD = policy.hidden(torch.tensor(tokens, device=device), seen.positions_T, layout, seen.media)
    return [(family, hidden_TD[end]) for family, end in ends]
