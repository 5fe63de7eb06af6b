"""The noise of sampling, as a pure function of what is sampled.

Gumbel-max: argmax(logits / T + g) is a draw from softmax(logits / T). g depends on seed, split, rollout,
attempt, prompt, sibling, turn, position and token id alone, so a completion is the same whatever it is
batched with, on any number of ranks, and after a resume.

Axes: R rows, V vocabulary, B blocks of the vocabulary, C tokens of a block.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from covey.kernels.draws import Drawn, Filters
from covey.rollout.filters import bitmaps, border_margins, kept_tokens
from covey.types import TurnId

_MASK_32 = 0xFFFFFFFF
# Tokens of a block of the vocabulary, and what sets the noise of blocks apart from that of tokens.
_BLOCK = 512
_BLOCK_KEY = 0x5BF03635
# The most positions, and the most numbers of noise, that are made at once.
_AHEAD, _AHEAD_CELLS = 8, 1 << 18


def row_key(turn: TurnId) -> int:
    """A 32-bit number from the id of a turn, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(turn.text.encode(), digest_size=4).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers held in int64, whose output bits each depend on every input bit.

    Two rounds of xor-shift and multiply by odd constants; products of two 32-bit numbers wrap in int64
    without harm, as only their low 32 bits are kept.
    """
    x = x ^ (x >> 16)
    x.mul_(0x7FEB352D).bitwise_and_(_MASK_32)
    x ^= x >> 15
    x.mul_(0x846CA68B).bitwise_and_(_MASK_32)
    x ^= x >> 16
    return x


def token_table(vocab: int, device: torch.device) -> Tensor:
    """The token's share of the noise, int64 (V,): made once by an engine and given to every draw."""
    token_V = torch.arange(vocab, device=device, dtype=torch.int64) * 0x9E3779B1
    return _mix(token_V & _MASK_32)


def gumbel(key_R: Tensor, position_R: Tensor, table: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) in float32 for int64 row keys and positions; `table` is (V,) or (R, V).

    The uniform number u is exact near 0, where the largest noise comes from: g = -log(-log1p(-u)) reaches 22,
    so a token of probability 1e-9 can still be drawn.
    """
    state_R = _mix(key_R ^ _mix(position_R & _MASK_32))
    bits_RV = _mix(state_R[:, None] ^ table)
    minus_u_RV = bits_RV.to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    # The largest bit patterns round to 1 in float32.
    minus_u_RV.clamp_(min=2.0**-24 - 1.0)
    return minus_u_RV.log1p_().neg_().log_().neg_()


class Ahead:
    """The noise of rows that draw one position after the other, from `position_R` on.

    It is made for several positions at once, as its calls cost more than its numbers: for `first` of them,
    and then for twice as many each time, since rows that have run on together tend to go on.
    """

    def __init__(self, key_R: Tensor, position_R: Tensor, table_V: Tensor, first: int = 1) -> None:
        self._key_R, self._position_R, self._table_V = key_R, position_R, table_V
        self._count = first
        self._made: list[Tensor] = []

    def next(self) -> Tensor:
        """`gumbel` of every row's next position, (R, V)."""
        if not self._made:
            most = max(1, _AHEAD_CELLS // (self._key_R.shape[0] * self._table_V.shape[0]))
            step_K1 = torch.arange(min(self._count, most), device=self._key_R.device)[:, None]
            position_KR = self._position_R + step_K1
            noise_XV = gumbel(self._key_R.repeat(len(step_K1)), position_KR.flatten(), self._table_V)
            self._made = list(noise_XV.view(*position_KR.shape, -1))[::-1]
            self._position_R = self._position_R + len(step_K1)
            self._count = min(2 * self._count, _AHEAD)
        return self._made.pop()


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    key_R: Tensor,
    position_R: Tensor,
    table_V: Tensor,
    ahead: Ahead | None = None,
    filters: Filters | None = None,
) -> Drawn:
    """Draw one token a row: ids (R,) and their logprobs (R,) in float32 under softmax(logits /
    temperature), and the sets that filters leave, within which the logprobs are then.

    `ahead` gives the noise of the same keys and positions where it is made ahead. A large vocabulary is drawn
    from in two steps, a block of it by the blocks' masses and then a token of the block: the same
    distribution, for noise of a few hundred numbers a row in place of V.
    """
    scaled_RV = logits_RV.float() / temperature_R[:, None]
    if filters is None:
        return Drawn(*_drawn(scaled_RV, key_R, position_R, table_V, ahead))
    is_kept_RV = kept_tokens(scaled_RV, filters)
    scaled_RV.masked_fill_(~is_kept_RV, float("-inf"))
    found = _drawn(scaled_RV, key_R, position_R, table_V, ahead)
    return Drawn(*found, bitmaps(is_kept_RV, may_wait=filters.may_wait))


def _drawn(
    scaled_RV: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor, ahead: Ahead | None
) -> tuple[Tensor, Tensor]:
    """Draw ids (R,) from softmax(scaled), and return them with their logprobs (R,)."""
    if scaled_RV.shape[1] <= _BLOCK:
        logprob_RV = scaled_RV.log_softmax(dim=1)
        noise_RV = ahead.next() if ahead is not None else gumbel(key_R, position_R, table_V)
        token_R1 = (logprob_RV + noise_RV).max(dim=1, keepdim=True).indices
        return token_R1[:, 0], logprob_RV.gather(1, token_R1)[:, 0]
    mass_RB = _block_masses(scaled_RV)
    block_RB = _block_scores(mass_RB, key_R, position_R, table_V)
    token_RC, score_RC = _token_scores(scaled_RV, block_RB.argmax(dim=1), key_R, position_R, table_V)
    token_R1 = token_RC.gather(1, score_RC.argmax(dim=1, keepdim=True))
    return token_R1[:, 0], scaled_RV.gather(1, token_R1)[:, 0] - mass_RB.logsumexp(dim=1)


def draws(
    logprob_RV: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor, filters: Filters | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens (R,) that `sample` draws from these logprobs, and by how much (R,): logprobs that are all
    wrong by less than half of it give the same token. Behind filters it is how far the set is from another
    one, where that is less."""
    if filters is None:
        return _draws(logprob_RV, key_R, position_R, table_V)
    is_kept_RV = kept_tokens(logprob_RV, filters)
    kept_RV = logprob_RV.masked_fill(~is_kept_RV, float("-inf"))
    token_R, margin_R = _draws(kept_RV, key_R, position_R, table_V)
    return token_R, torch.minimum(margin_R, border_margins(logprob_RV, is_kept_RV, filters).float())


def _draws(logprob_RV: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor) -> tuple[Tensor, Tensor]:
    if logprob_RV.shape[1] <= _BLOCK:
        best = (logprob_RV + gumbel(key_R, position_R, table_V)).topk(2, dim=1)
        return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
    blocks = _block_scores(_block_masses(logprob_RV), key_R, position_R, table_V).topk(2, dim=1)
    token_RC, score_RC = _token_scores(logprob_RV, blocks.indices[:, 0], key_R, position_R, table_V)
    best = score_RC.topk(2, dim=1)
    margin_R = torch.minimum(blocks.values[:, 0] - blocks.values[:, 1], best.values[:, 0] - best.values[:, 1])
    return token_RC.gather(1, best.indices[:, :1])[:, 0], margin_R


def _block_scores(mass_RB: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor) -> Tensor:
    """What the blocks of the vocabulary are drawn by (R, B): the largest wins."""
    return mass_RB + gumbel(key_R ^ _BLOCK_KEY, position_R, table_V[: mass_RB.shape[1]])


def _token_scores(
    scaled_RV: Tensor, block_R: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens of one block for each row, and what they are drawn by (R, C): the largest wins."""
    token_RC = block_R[:, None] * _BLOCK + torch.arange(_BLOCK, device=block_R.device)
    is_token_RC = token_RC < scaled_RV.shape[1]
    token_RC = token_RC * is_token_RC
    score_RC = scaled_RV.gather(1, token_RC) + gumbel(key_R, position_R, table_V[token_RC])
    return token_RC, score_RC.masked_fill_(~is_token_RC, float("-inf"))


def _block_masses(scaled_RV: Tensor) -> Tensor:
    """Log of the sum of exp over each block of the vocabulary; the last block may be shorter."""
    even = scaled_RV.shape[1] // _BLOCK * _BLOCK
    masses = [scaled_RV[:, :even].unflatten(1, (-1, _BLOCK)).logsumexp(dim=2)]
    if even < scaled_RV.shape[1]:
        masses.append(scaled_RV[:, even:].logsumexp(dim=1, keepdim=True))
    return torch.cat(masses, dim=1)
