"""From a micro-batch and the policy's statistics to the inputs of the loss."""

from __future__ import annotations

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
