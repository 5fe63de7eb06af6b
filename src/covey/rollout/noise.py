"""The noise of sampling, as a pure function of what is sampled.

Gumbel-max: argmax(logits / T + g) is a draw from softmax(logits / T). g depends on seed, split, rollout,
attempt, prompt, sibling, position and token id alone, so a completion is the same whatever it is batched
with, on any number of ranks, and after a resume.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from covey.types import NoiseKey

_MASK_32 = 0xFFFFFFFF


def row_key(key: NoiseKey) -> int:
    """A 32-bit number from a noise key, equal on every machine."""
    text = f"{key.seed}/{key.split}/{key.rollout}/{key.attempt}/{key.prompt_id}/{key.sibling}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers held in int64, whose output bits each depend on every input bit.

    Two rounds of xor-shift and multiply by odd constants; products of two 32-bit numbers wrap in int64
    without harm, as only their low 32 bits are kept.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK_32
    return x ^ (x >> 16)


def token_table(vocab: int, device: torch.device) -> Tensor:
    """The token's share of the noise, int64 (V,): made once by an engine and given to every draw."""
    token_V = torch.arange(vocab, device=device, dtype=torch.int64) * 0x9E3779B1
    return _mix(token_V & _MASK_32)


def gumbel(key_R: Tensor, position_R: Tensor, table_V: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) in float32 for int64 row keys and positions.

    The uniform number u is exact near 0, where the largest noise comes from: g = -log(-log1p(-u)) reaches 22,
    so a token of probability 1e-9 can still be drawn.
    """
    state_R = _mix(key_R ^ _mix(position_R & _MASK_32))
    bits_RV = _mix(state_R[:, None] ^ table_V[None, :])
    uniform_RV = (bits_RV.to(torch.float32) + 0.5) * 2.0**-32
    # The largest bit patterns round to 1 in float32.
    uniform_RV.clamp_(max=1.0 - 2.0**-24)
    return uniform_RV.neg_().log1p_().neg_().log_().neg_()


def sample(
    logits_RV: Tensor, temperature_R: Tensor, key_R: Tensor, position_R: Tensor, table_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: ids (R,) and their logprobs (R,) in float32 under softmax(logits /
    temperature)."""
    scaled_RV = logits_RV.float() / temperature_R[:, None]
    token_R = (scaled_RV + gumbel(key_R, position_R, table_V)).argmax(dim=-1)
    logprob_R = scaled_RV.gather(1, token_R[:, None])[:, 0] - scaled_RV.logsumexp(dim=-1)
    return token_R, logprob_R
