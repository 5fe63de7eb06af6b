"""What the loss `real` needs of a whole optimizer step before its first backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.activity import Activity
from covey.algorithm.contrast import Contrast, contrast, contrast_sums
from covey.algorithm.ratios import sequence_means
from covey.comm import Comm
from covey.learner.backends.base import Backend
from covey.types import Batch, MicroBatch


def contrasts(batch: Batch, backend: Backend, tau: float, comm: Comm) -> Sequence[Contrast]:
    """One for each micro-batch of this rank, from the scores that the policy gives at this moment.

    Where there are old logprobs this takes a forward pass without gradient over every row of the step; else
    every score is 0. The sums are taken over all ranks.
    """
    scores = [score_S / tau for score_S in _scores(batch.micro_batches, backend, comm.activity)]
    members = [micro.group_S - batch.groups.start for micro in batch.micro_batches]
    num_groups = len(batch.groups)
    local_4P = torch.zeros(4, num_groups, dtype=torch.float64)
    for score_S, group_S, micro in zip(scores, members, batch.micro_batches, strict=True):
        is_real_S = micro.trained_count_S > 0
        chosen = (score_S[is_real_S], _advantages(micro)[is_real_S], group_S[is_real_S])
        local_4P += contrast_sums(*chosen, num_groups).cpu()
    sums_4P = torch.tensor(comm.sum(local_4P.flatten().tolist()), dtype=torch.float64).view(4, num_groups)
    return [
        contrast(score_S, _advantages(micro), group_S, sums_4P.to(score_S.device), tau)
        for score_S, group_S, micro in zip(scores, members, batch.micro_batches, strict=True)
    ]


def _scores(micros: Sequence[MicroBatch], backend: Backend, activity: Activity) -> list[Tensor]:
    """Means (S,) of the log ratios of new to old, of each."""
    if any(micro.old_logprob_N is None for micro in micros):
        return [torch.zeros_like(micro.trained_count_S, dtype=torch.float32) for micro in micros]
    now_N = backend.annotate(micros, "old", activity.advance)
    parts = zip(micros, now_N.split([m.target_N.shape[0] for m in micros]), strict=True)
    return [sequence_means(now - m.old_logprob_N, m.sequence_N, m.trained_count_S) for m, now in parts]


def _advantages(micro: MicroBatch) -> Tensor:
    """The advantage (S,) that all tokens of a sequence have."""
    out_S = torch.zeros_like(micro.trained_count_S, dtype=torch.float32)
    return out_S.scatter(0, micro.sequence_N, micro.advantage_N)
