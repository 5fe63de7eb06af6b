"""What the loss is told of a micro-batch, and of a whole optimizer step.

Axes: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast
from covey.algorithm.losses import LossInputs
from covey.types import Batch, MicroBatch, TokenStats


def micro_inputs(
    stats: TokenStats, micro: MicroBatch, batch: Batch, contrast: Contrast | None = None
) -> LossInputs:
    """Those of one micro-batch; `contrast` is for the loss `real`."""
    return LossInputs(
        logprob_N=stats.logprob_N,
        old_logprob_N=micro.old_logprob_N,
        ref_logprob_N=micro.ref_logprob_N,
        advantage_N=micro.advantage_N,
        sequence_N=micro.sequence_N,
        trained_count_S=micro.trained_count_S,
        denominators=batch.denominators,
        sampler_logprob_N=micro.sampler_logprob_N,
        entropy_N=stats.entropy_N,
        keep_N=micro.keep_N,
        contrast=contrast,
    )


def step_inputs(batch: Batch, of_groups: Sequence[Contrast | None]) -> LossInputs:
    """Those of all micro-batches, one behind the other, where every ratio is 1; what the policy says is 0."""
    micros = batch.micro_batches
    sequences = [micro.trained_count_S.shape[0] for micro in micros]
    ahead = torch.tensor([0, *sequences]).cumsum(0).tolist()
    contrasts = [c for c in of_groups if c is not None]
    advantage_N = torch.cat([micro.advantage_N for micro in micros])
    return LossInputs(
        logprob_N=torch.zeros_like(advantage_N),
        entropy_N=torch.zeros_like(advantage_N),
        old_logprob_N=None,
        ref_logprob_N=_joined(batch, lambda micro: micro.ref_logprob_N),
        advantage_N=advantage_N,
        sequence_N=torch.cat([m.sequence_N + before for m, before in zip(micros, ahead, strict=False)]),
        trained_count_S=torch.cat([micro.trained_count_S for micro in micros]),
        denominators=batch.denominators,
        sampler_logprob_N=torch.cat([micro.sampler_logprob_N for micro in micros]),
        keep_N=_joined(batch, lambda micro: micro.keep_N),
        contrast=None
        if not contrasts
        else Contrast(
            coefficient_S=torch.cat([c.coefficient_S for c in contrasts]),
            value_S=torch.cat([c.value_S for c in contrasts]),
        ),
    )


def _joined(batch: Batch, part_of: Callable[[MicroBatch], Tensor | None]) -> Tensor | None:
    """A part of every micro-batch, one behind the other; None where there is none."""
    parts = [part_of(micro) for micro in batch.micro_batches]
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "all micro-batches of a step have the same parts"
    return torch.cat(present) if present else None
