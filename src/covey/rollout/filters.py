"""Filters of sampling: which tokens of the vocabulary are left to draw from.

Behind the temperature comes min_p, then top_k, then top_p. A token is left where its logit is at least the
largest one plus log(min_p), and at least the k-th largest (all that equal it are left). Of those, sorted by
descending logit and ascending id, a token is left while the softmax mass before it is less than top_p.

Masses are added up as integers, 2^40 for the largest logit. So a sum is the same in whatever order it is
added up, and every way to find a set finds the same one.

Axes: R rows, V vocabulary, W the int32 of a bitmap over the vocabulary, P tokens of a sorted prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from covey.kernels.draws import Filters
from covey.types import KeptSets, SamplingParams
from covey.types.kept import bitmap_words

# The mass of the largest logit. The masses of 2^22 tokens add up within an int64.
_MASS = float(1 << 40)
# Tokens that are sorted at first, and how many times as many each time that they are too few.
_PREFIX, _GROWTH = 64, 8


def filters_of(sampling: Sequence[SamplingParams], device: torch.device, spare: int = 0) -> Filters | None:
    """Return the filters of rows, with `spare` rows without any behind them; None where none has any."""
    if not any(own.has_filters for own in sampling):
        return None
    return Filters(
        torch.tensor([own.top_p for own in sampling] + [1.0] * spare, dtype=torch.float64, device=device),
        torch.tensor([own.top_k for own in sampling] + [0] * spare, device=device),
        torch.tensor([own.min_p for own in sampling] + [0.0] * spare, device=device),
        may_wait=device.type == "cpu",
    )


def kept_sets(
    sampling: Sequence[SamplingParams], kept_nkW: Tensor | None, vocab: int
) -> list[KeptSets | None]:
    """Return the sets of the k tokens of each row, out of bitmaps; None for a row without filters."""
    found: list[KeptSets | None] = [None] * len(sampling)
    if kept_nkW is not None:
        number_r = [number for number, own in enumerate(sampling) if own.has_filters]
        bitmap_rkW, k = kept_nkW.cpu().numpy()[number_r], kept_nkW.shape[1]
        every = KeptSets.of_bitmaps(bitmap_rkW.reshape(len(number_r) * k, -1), vocab)
        for place, number in enumerate(number_r):
            found[number] = every.part(place * k, (place + 1) * k)
    return found


def kept_tokens(scaled_RV: Tensor, filters: Filters) -> Tensor:
    """Say which tokens are left of float32 logits that are divided by the temperature: bool (R, V).

    A row without filters keeps all, as one whose largest logit is not a finite number does. Another row keeps
    no token of logit minus infinity.
    """
    if not filters.may_wait:
        return _by_sorting_all(scaled_RV, filters)
    row_r = filters.is_on_n.nonzero()[:, 0]
    if len(row_r) == len(scaled_RV):
        return _by_sorting_few(scaled_RV, filters)
    is_kept_RV = torch.ones_like(scaled_RV, dtype=torch.bool)
    if len(row_r):
        own_r = (tensor[row_r] for tensor in filters.tensors)
        is_kept_RV[row_r] = _by_sorting_few(scaled_RV[row_r], Filters.of(own_r, may_wait=True))
    return is_kept_RV


def border_margins(scaled_RV: Tensor, is_kept_RV: Tensor, filters: Filters) -> Tensor:
    """Return how far each set is from another one (R,) float64: logits that are all wrong by less than half
    of it give the same set. Infinite for a row without filters."""
    sorted_RV = scaled_RV.double().sort(dim=1, descending=True).values
    num_R1, vocab = is_kept_RV.sum(dim=1, keepdim=True), scaled_RV.shape[1]
    least_R1 = sorted_RV[:, :1] + filters.min_p_n.double().log()[:, None]
    at_min_p_R = (sorted_RV - least_R1).abs().nan_to_num(nan=math.inf).amin(dim=1)
    gap_RV = sorted_RV - torch.nn.functional.pad(sorted_RV[:, 1:], (0, 1), value=-math.inf)
    last_R1 = (filters.top_k_n.clamp(min=1, max=vocab) - 1)[:, None]
    at_top_k_R = gap_RV.gather(1, last_R1)[:, 0].masked_fill(filters.top_k_n <= 0, math.inf)
    is_left_RV = (sorted_RV >= least_R1) & (
        (sorted_RV >= sorted_RV.gather(1, last_R1)) | (filters.top_k_n <= 0)[:, None]
    )
    end_RV = (sorted_RV - sorted_RV[:, :1]).exp().masked_fill(~is_left_RV, 0).cumsum(dim=1)
    before_R1 = torch.nn.functional.pad(end_RV, (1, 0)).gather(1, num_R1 - 1)
    share_R2 = torch.cat([before_R1, end_RV.gather(1, num_R1 - 1)], dim=1) / end_RV[:, -1:]
    to_share_R = (share_R2.logit() - filters.top_p_n.logit()[:, None]).abs().amin(dim=1)
    to_next_R = gap_RV.gather(1, num_R1 - 1)[:, 0].masked_fill(
        num_R1[:, 0] == is_left_RV.sum(dim=1), math.inf
    )
    at_top_p_R = torch.minimum(to_share_R, to_next_R).masked_fill(filters.top_p_n >= 1, math.inf)
    return torch.stack([at_min_p_R, at_top_k_R, at_top_p_R]).amin(dim=0)


def bitmaps(is_kept_RV: Tensor, *, may_wait: bool) -> Tensor:
    """Return sets as int32 (R, W): bit b of number w stands for id 32 w + b."""
    rows, vocab = is_kept_RV.shape
    words = bitmap_words(vocab)
    is_kept_RX = torch.nn.functional.pad(is_kept_RV, (0, 32 * words - vocab))
    if may_wait:
        import numpy as np

        packed = np.packbits(is_kept_RX.numpy(), axis=1, bitorder="little")
        return torch.from_numpy(packed.view("<i4").astype(np.int32, copy=False))
    place_B = torch.arange(32, dtype=torch.int32, device=is_kept_RV.device)
    bit_B = torch.ones_like(place_B) << place_B
    # Bits differ, so that their sum sets each of them.
    return (is_kept_RX.view(rows, words, 32) * bit_B).sum(dim=2, dtype=torch.int32)


def _masses(scaled_RV: Tensor, top_R1: Tensor) -> Tensor:
    """The softmax mass of each token, as a whole number."""
    return (scaled_RV - top_R1).exp_().mul_(_MASS).to(torch.int64)


def _bound(total_R1: Tensor, top_p_R: Tensor) -> Tensor:
    """The mass before a token from which on it is left out; above all mass where top_p is off."""
    bound_R1 = torch.minimum((total_R1 * top_p_R[:, None]).ceil().to(torch.int64), total_R1)
    return torch.where(top_p_R[:, None] < 1, bound_R1, total_R1 + 1)


def _floor(top_R1: Tensor, kth_R1: Tensor, filters: Filters) -> Tensor:
    """The least logit that min_p and top_k leave."""
    return torch.maximum(top_R1 + filters.min_p_n.log()[:, None], kth_R1)


def _by_sorting_all(scaled_RV: Tensor, filters: Filters) -> Tensor:
    """The sets by steps whose shapes do not depend on them; the host reads nothing."""
    sorted_RV, id_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
    top_R1, vocab = sorted_RV[:, :1], scaled_RV.shape[1]
    last_R = filters.top_k_n.masked_fill(filters.top_k_n <= 0, vocab).clamp(max=vocab) - 1
    floor_R1 = _floor(top_R1, sorted_RV.gather(1, last_R[:, None]), filters)
    is_left_RV = (sorted_RV >= floor_R1) & (sorted_RV > -math.inf)
    mass_RV = _masses(scaled_RV, top_R1).gather(1, id_RV).masked_fill_(~is_left_RV, 0)
    end_RV = mass_RV.cumsum(dim=1)
    is_left_RV &= end_RV - mass_RV < _bound(end_RV[:, -1:], filters.top_p_n)
    is_left_RV |= ~(filters.is_on_n[:, None] & top_R1.isfinite())
    return torch.empty_like(is_left_RV).scatter_(1, id_RV, is_left_RV)


def _by_sorting_few(scaled_RV: Tensor, filters: Filters) -> Tensor:
    """The same sets, of rows that all have filters: what is sorted is little more than what is left."""
    vocab = scaled_RV.shape[1]
    top_R1 = scaled_RV.amax(dim=1, keepdim=True)
    kth_R1 = torch.full_like(top_R1, -math.inf)
    is_cut_R = (filters.top_k_n > 0) & (filters.top_k_n < vocab)
    if bool(is_cut_R.any()):
        most = int(filters.top_k_n[is_cut_R].max())
        place_R1 = filters.top_k_n.masked_fill(~is_cut_R, 1)[:, None] - 1
        kth_R1 = scaled_RV.topk(most, dim=1).values.gather(1, place_R1).where(is_cut_R[:, None], kth_R1)
    floor_R1 = _floor(top_R1, kth_R1, filters)
    is_kept_RV = (scaled_RV >= floor_R1) & (scaled_RV > -math.inf)
    row_r = ((filters.top_p_n < 1) & top_R1[:, 0].isfinite()).nonzero()[:, 0]
    if len(row_r):
        mass_rV = _masses(scaled_RV[row_r], top_R1[row_r]).masked_fill_(~is_kept_RV[row_r], 0)
        bound_r1 = _bound(mass_rV.sum(dim=1, keepdim=True), filters.top_p_n[row_r])
        is_kept_RV[row_r] = _nucleus(scaled_RV[row_r], mass_rV, bound_r1)
    return is_kept_RV | ~top_R1.isfinite()


def _nucleus(scaled_RV: Tensor, mass_RV: Tensor, bound_R1: Tensor) -> Tensor:
    """Say which tokens have less mass before them than the bound; some token reaches it."""
    vocab, prefix = scaled_RV.shape[1], min(_PREFIX, scaled_RV.shape[1])
    least_R1 = torch.empty_like(scaled_RV[:, :1])
    equal_R1 = torch.empty_like(bound_R1)
    row_r = torch.arange(len(scaled_RV))
    while len(row_r):
        logit_rP, id_rP = scaled_RV[row_r].topk(prefix, dim=1)
        own_rP = mass_RV[row_r].gather(1, id_rP)
        end_rP = own_rP.cumsum(dim=1)
        num_r1 = (end_rP - own_rP < bound_R1[row_r]).sum(dim=1, keepdim=True)
        least_R1[row_r] = logit_rP.gather(1, num_r1 - 1)
        equal_R1[row_r] = num_r1 - (logit_rP > least_R1[row_r]).sum(dim=1, keepdim=True)
        row_r = row_r[end_rP[:, -1] < bound_R1[row_r, 0]]
        prefix = min(_GROWTH * prefix, vocab)
    is_equal_RV = scaled_RV == least_R1
    over_r = (is_equal_RV.sum(dim=1) > equal_R1[:, 0]).nonzero()[:, 0]
    if len(over_r):
        # Of equal logits those of the smallest ids are left.
        is_equal_RV[over_r] &= is_equal_RV[over_r].cumsum(dim=1) <= equal_R1[over_r]
    return (scaled_RV > least_R1) | is_equal_RV
